"""Losses on the router's outputs: the load-balancing loss in all published variants, and the router z-loss.

Reference: arXiv 2506.14038, equation 3 and first listing; Switch Transformers (arXiv 2101.03961); OLMoE (arXiv
2409.02060); counts over the full step: Qiu et al. (arXiv 2501.11873); tokens pooled over all layers:
`load_balancing_loss_func` of transformers' Mixtral and OLMoE; router z-loss: ST-MoE (arXiv 2202.08906), equation 5.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.balancing.base import Balancing, Properties, require_unused_experts
from simbal.config.values import check_choice, check_nonnegative
from simbal.errors import UserError
from simbal.model.router import Router, Routing, count_tokens, topk_weights

GATES = {
    "dense": "probability of i",
    "sparse_raw": "probability of i, 0 where not chosen",
    "sparse_renorm": "probability of i divided by the sum over the chosen experts, 0 where not chosen",
    "layer": "weight of i in the layer's output, 0 where not chosen",
}
Scope = Literal["sequence", "micro", "global"]


class LoadBalancingLoss(Balancing):
    """loss = coef * mean over groups of tokens of E sum_i f_i P_i, where a group is a sequence or a full batch.

    f_i is the fraction of a group's tokens that chose expert i (sums to K, no gradient), and P_i is their mean `gates`.
    Uniform load with uniform probabilities is a stationary point, not a lower bound. With scope=global, f counts the
    full optimizer step. The loss is linear in P, so micro-batches together give exactly the gradient of one batch.
    """

    citation = "arXiv 2506.14038, equation 3; arXiv 2101.03961"
    unit = "OLMoE's loss, (E/K) sum_i f_i P_i averaged over layers"

    def __init__(
        self,
        coef: float = 0.01,
        gates: str = "dense",
        scope: Scope = "sequence",
        norm: str = "E",
        choice: str = "unbiased",
        over_layers: str | None = None,
    ) -> None:
        """Select a variant of the loss.

        Args:
            coef: multiplier.
            gates: the quantity averaged in P: dense (equation 3), sparse_raw, sparse_renorm, or layer (the listing).
                layer equals sparse_renorm or sparse_raw, depending on router.renormalize, but does not normalize
                sigmoids and includes router.scale.
            scope: group of tokens: sequence (the listing), micro (a micro-batch) or global (f over the full step).
            norm: E, or E/K (OLMoE: uniform routing costs 1 instead of K).
            choice: f counts the unbiased choice by the K largest logits, or the actual, biased choice.
            over_layers: sum, mean (OLMoE), or None to use `optim.aux_layer_reduce`.

        Raises:
            UserError: an argument has an invalid value, or f and P count different choices.
        """
        super().__init__()
        self.coef = check_nonnegative("coef", coef)
        self.gates = check_choice("gates", gates, [*GATES])
        self.scope = check_choice("scope", scope, get_args(Scope))
        self.norm = check_choice("norm", norm, ("E", "E/K"))
        self.choice = check_choice("choice", choice, ("unbiased", "biased"))
        if gates == "layer" and choice != "biased":
            raise UserError(
                f"choice={choice} must be biased with gates=layer: the layer's weights are for the actual choice"
            )
        self.over_layers = over_layers and check_choice("over_layers", over_layers, ("sum", "mean"))
        group = {"sequence": "a sequence", "micro": "a micro-batch", "global": "a micro-batch (f: of the full step)"}
        self.formula = (
            f"coef * {norm} * sum_i f_i P_i; f_i: share of the tokens of {group[scope]} that chose i, sums to K; "
            f"P_i: their mean {GATES[gates]}"
        )
        self.properties = Properties(
            differentiable=True,
            scope=scope,
            causal=True,
            revives_dead_experts=gates in ("dense", "sparse_raw"),  # other gates give no gradient where not chosen
        )

    def prepare(self, routers: Sequence[Router]) -> None:
        """Raise `UserError` for routers that always choose every expert: f would be 1 and the loss constant."""
        require_unused_experts(routers)

    @property
    def needs_step_counts(self) -> bool:
        """Whether f counts the full step (scope=global)."""
        return self.scope == "global"

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the tokens per expert and, in the last column, the number of tokens, (L, E + 1)."""
        if self.scope != "global":
            return super().measure(routings)
        counts_LE = torch.stack([chosen_mask(self._experts(routing), routing).sum(0) for routing in routings])
        return F.pad(counts_LE, (0, 1), value=len(routings[0].probs_NE))

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,); with scope=global, f comes from `step_counts_LE`."""
        if step_counts_LE is None:
            return super().losses(routings, None)
        f_LE = step_counts_LE[:, :-1] / step_counts_LE[:, -1:]
        return torch.stack([self.loss(routing, f_E) for routing, f_E in zip(routings, f_LE, strict=True)])

    def loss(self, routing: Routing, f_E: Tensor | None = None) -> Tensor:
        """Return the loss of one layer, a scalar; without `f_E`, f comes from the tokens of `routing`."""
        experts_NK = self._experts(routing)
        f_BE = self._means(chosen_mask(experts_NK, routing), routing) if f_E is None else f_E
        p_BE = self._means(averaged_gates(routing, experts_NK, self.gates), routing)
        scale = self.coef * routing.probs_NE.shape[-1] / (1 if self.norm == "E" else routing.top_k)
        return scale * (f_BE * p_BE).sum(-1).mean()

    def _means(self, values_NE: Tensor, routing: Routing) -> Tensor:
        """Return the means over each sequence, (B, E), or over all tokens, (1, E)."""
        if self.scope != "sequence" or routing.lengths_B is None:
            groups = routing.num_sequences if self.scope == "sequence" else 1
            return values_NE.view(groups, -1, values_NE.shape[-1]).mean(1)
        lengths_B = routing.lengths_B
        sequence_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(lengths_B)
        sums_BE = values_NE.new_zeros(len(lengths_B), values_NE.shape[-1]).index_add(0, sequence_N, values_NE)
        return sums_BE / lengths_B[:, None]

    def _experts(self, routing: Routing) -> Tensor:
        return routing.topk_experts_NK if self.choice == "biased" else routing.unsteered_experts_NK

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return coef * (K if norm=E) * (L if layers are summed)."""
        return self.coef * num_layers * (top_k if self.norm == "E" else 1)


def chosen_mask(experts_NK: Tensor, routing: Routing) -> Tensor:
    """Return 1 for the experts in `experts_NK`, else 0, (N, E); by index, as the weight of a chosen expert may be 0."""
    return scatter_to_experts(experts_NK, torch.ones_like(experts_NK, dtype=routing.probs_NE.dtype), routing)


def averaged_gates(routing: Routing, experts_NK: Tensor, kind: str) -> Tensor:
    """Return the gates averaged in P, (N, E); `kind` is a key of `GATES`."""
    if kind == "dense":
        return routing.distribution_NE
    if kind == "layer":
        return scatter_to_experts(experts_NK, routing.topk_probs_NK, routing)
    if kind == "sparse_raw":
        return routing.distribution_NE * chosen_mask(experts_NK, routing)
    weights_NK = topk_weights(routing.logits_NE, routing.probs_NE, experts_NK, routing.gating, renormalize=True)
    return scatter_to_experts(experts_NK, weights_NK, routing)


def scatter_to_experts(experts_NK: Tensor, values_NK: Tensor, routing: Routing) -> Tensor:
    """Return the values in the columns of their experts, 0 elsewhere, (N, E); empty slots are ignored."""
    num_tokens, num_experts = routing.probs_NE.shape
    return values_NK.new_zeros(num_tokens, num_experts + 1).scatter(-1, experts_NK, values_NK)[:, :num_experts]


class PooledLoadBalancingLoss(Balancing):
    """loss = coef * E sum_i f_i P_i, with f and P over the tokens pooled over all layers.

    Opposite imbalances of two layers cancel, so the loss can be minimal while every layer is imbalanced.
    """

    formula = "coef * E * sum_i f_i P_i; f_i, P_i: fraction and mean probability over the tokens of all layers"
    citation = "transformers, load_balancing_loss_func"
    unit = "OLMoE's loss, (E/K) sum_i f_i P_i averaged over layers"
    over_layers = "mean"  # every layer gets the same value
    properties = Properties(
        differentiable=True, scope="micro", causal=True, revives_dead_experts=True, mixes_layers=True
    )

    def __init__(self, coef: float = 0.01) -> None:
        super().__init__()
        self.coef = check_nonnegative("coef", coef)

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return the loss once per layer, (L,), the same value for each."""
        num_tokens, num_experts = routings[0].probs_NE.shape
        f_E = self.measure(routings).sum(0) / (num_tokens * len(routings))
        p_E = torch.cat([routing.distribution_NE for routing in routings]).mean(0)
        return (self.coef * num_experts * (f_E * p_E).sum()).expand(len(routings))

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return how many tokens have each expert among their K largest logits, (L, E)."""
        return torch.stack(
            [count_tokens(routing.unsteered_experts_NK, routing.probs_NE.shape[1]) for routing in routings]
        )

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return coef * K."""
        return self.coef * top_k


class RouterZLoss(Balancing):
    """loss = coef * mean over tokens of (logsumexp_E logits)^2; it does not balance the load."""

    formula = "coef * mean over tokens of (logsumexp_E logits)^2"
    citation = "arXiv 2202.08906, equation 5"
    properties = Properties(differentiable=True, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, coef: float = 0.001) -> None:
        super().__init__()
        self.coef = check_nonnegative("coef", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the logits that enter the gating, a scalar."""
        return self.coef * routing.logits_NE.logsumexp(-1).square().mean()
