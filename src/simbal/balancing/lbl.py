"""Losses of what a router gives the tokens: load balancing in every published reading, and the router z-loss.

Reference: arXiv 2506.14038, equation 3 and first listing; Switch Transformers (arXiv 2101.03961); OLMoE (arXiv
2409.02060); the whole step's counts: Qiu et al. (arXiv 2501.11873); over the tokens of all layers together:
`load_balancing_loss_func` of transformers' Mixtral and OLMoE; router z-loss: ST-MoE (arXiv 2202.08906), equation 5.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.balancing.base import Balancing, Properties, require_unchosen
from simbal.config.values import not_negative, one_of
from simbal.errors import UserError
from simbal.model.router import Router, Routing, count, topk_weights

GATES = {
    "dense": "probability of i",
    "sparse_raw": "probability of i, 0 where not chosen",
    "sparse_renorm": "probability of i divided by that of all chosen, 0 where not chosen",
    "layer": "weight of i in the layer's output, 0 where not chosen",
}
Scope = Literal["sequence", "micro", "global"]


class LoadBalancingLoss(Balancing):
    """loss = coef * mean over groups of tokens of E sum_i f_i P_i, a group being a sequence or all of a batch.

    f_i is the share of a group's tokens that chose expert i (sums to K, no gradient), P_i their mean `gates`. Uniform
    use at uniform probabilities is a stationary point, not a lower bound. With scope=global f counts the whole
    optimizer step; the loss is linear in P, so the micro-batches together give exactly the one-batch gradient.
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
        """Set which reading of the loss it is.

        Args:
            coef: the multiplier.
            gates: what P averages: dense (equation 3), sparse_raw, sparse_renorm, or layer (the listing), which is one
                of the two before it, as router.renormalize says, but not normalised of a sigmoid.
            scope: tokens taken together: sequence (the listing), micro (a micro-batch) or global (f over the step).
            norm: E, or E/K (OLMoE: uniform routing costs 1 instead of K).
            choice: f counts the unbiased choice, of the K largest logits, or the biased one, that was carried out.
            over_layers: sum, mean (OLMoE), or None for `optim.aux_layer_reduce`.

        Raises:
            UserError: a key has another value, or f and P are of different choices.
        """
        super().__init__()
        self.coef = not_negative("coef", coef)
        self.gates, self.scope = one_of("gates", gates, [*GATES]), one_of("scope", scope, get_args(Scope))
        self.norm, self.choice = one_of("norm", norm, ("E", "E/K")), one_of("choice", choice, ("unbiased", "biased"))
        if gates == "layer" and choice != "biased":
            raise UserError(f"choice={choice} must be biased with gates=layer: the layer weighs what was carried out")
        self.over_layers = over_layers and one_of("over_layers", over_layers, ("sum", "mean"))
        group = {"sequence": "a sequence", "micro": "a micro-batch", "global": "a micro-batch (f: of the whole step)"}
        self.formula = (
            f"coef * {norm} * sum_i f_i P_i; f_i: share of the tokens of {group[scope]} that chose i, sums to K; "
            f"P_i: their mean {GATES[gates]}"
        )
        self.properties = Properties(
            differentiable=True,
            scope=scope,
            causal=True,
            revives_dead_experts=gates in ("dense", "sparse_raw"),  # else who is not chosen may have no gradient
        )

    def prepare(self, routers: Sequence[Router]) -> None:
        """Raise `UserError` for routers that choose every expert: f is 1 everywhere and the loss a constant."""
        require_unchosen(routers)

    @property
    def needs_step_counts(self) -> bool:
        """Whether f counts the whole step, as with scope=global alone."""
        return self.scope == "global"

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the number of tokens that chose each expert and, last, of all tokens, (L, E + 1)."""
        if self.scope != "global":
            return super().measure(routings)
        counts_LE = torch.stack([chosen(self._experts(routing), routing).sum(0) for routing in routings])
        return F.pad(counts_LE, (0, 1), value=len(routings[0].probs_NE))

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,); with scope=global, f is taken from `step_counts_LE`."""
        if step_counts_LE is None:
            return super().losses(routings, None)
        f_LE = step_counts_LE[:, :-1] / step_counts_LE[:, -1:]
        return torch.stack([self._loss(routing, f_E) for routing, f_E in zip(routings, f_LE, strict=True)])

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of one layer with f from the tokens of `routing`; a scalar."""
        return self._loss(routing, None)

    def _loss(self, routing: Routing, f_E: Tensor | None) -> Tensor:
        experts_NK = self._experts(routing)
        groups = routing.num_sequences if self.scope == "sequence" else 1
        shape = (groups, -1, routing.probs_NE.shape[-1])
        f_BE = chosen(experts_NK, routing).view(shape).mean(1) if f_E is None else f_E
        p_BE = gates(routing, experts_NK, self.gates).view(shape).mean(1)
        scale = self.coef * shape[-1] / (1 if self.norm == "E" else routing.top_k)
        return scale * (f_BE * p_BE).sum(-1).mean()

    def _experts(self, routing: Routing) -> Tensor:
        return routing.topk_experts_NK if self.choice == "biased" else routing.unsteered_experts_NK

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return coef * (K if norm=E) * (L if layers are summed)."""
        return self.coef * num_layers * (top_k if self.norm == "E" else 1)


def chosen(experts_NK: Tensor, routing: Routing) -> Tensor:
    """Return 1 where the expert is among `experts_NK`, else 0, (N, E); by index, so that a weight may underflow."""
    return at_experts(experts_NK, torch.ones_like(experts_NK, dtype=routing.probs_NE.dtype), routing)


def gates(routing: Routing, experts_NK: Tensor, kind: str) -> Tensor:
    """Return the gates that P averages, (N, E); `kind` is a key of `GATES`."""
    if kind == "dense":
        return routing.distribution_NE
    if kind == "layer":
        return at_experts(experts_NK, routing.topk_probs_NK, routing)
    if kind == "sparse_raw":
        return routing.distribution_NE * chosen(experts_NK, routing)
    weights_NK = topk_weights(routing.logits_NE, routing.probs_NE, experts_NK, routing.gating, renormalize=True)
    return at_experts(experts_NK, weights_NK, routing)


def at_experts(experts_NK: Tensor, values_NK: Tensor, routing: Routing) -> Tensor:
    """Return the value of each chosen expert in its column, else 0, (N, E); those of empty slots are dropped."""
    num_tokens, num_experts = routing.probs_NE.shape
    return values_NK.new_zeros(num_tokens, num_experts + 1).scatter(-1, experts_NK, values_NK)[:, :num_experts]


class PooledLoadBalancingLoss(Balancing):
    """loss = coef * E sum_i f_i P_i, with f and P over the tokens of all layers together.

    Opposite imbalances of two layers cancel in it: it can be lowest while every layer is uneven.
    """

    formula = "coef * E * sum_i f_i P_i; f_i, P_i: share and mean probability over the tokens of all layers together"
    citation = "transformers, load_balancing_loss_func"
    unit = "OLMoE's loss, (E/K) sum_i f_i P_i averaged over layers"
    over_layers = "mean"  # every layer gets the same value
    properties = Properties(
        differentiable=True, scope="micro", causal=True, revives_dead_experts=True, mixes_layers=True
    )

    def __init__(self, coef: float = 0.01) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,), the same value for each."""
        num_tokens, num_experts = routings[0].probs_NE.shape
        f_E = self.measure(routings).sum(0) / (num_tokens * len(routings))
        p_E = torch.cat([routing.distribution_NE for routing in routings]).mean(0)
        return (self.coef * num_experts * (f_E * p_E).sum()).expand(len(routings))

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the number of tokens whose K largest logits hold each expert, (L, E)."""
        return torch.stack([count(routing.unsteered_experts_NK, routing.probs_NE.shape[1]) for routing in routings])

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return coef * K."""
        return self.coef * top_k


class RouterZLoss(Balancing):
    """loss = coef * mean over tokens of (logsumexp_E logits)^2; it balances nothing by itself."""

    formula = "coef * mean over tokens of (logsumexp_E logits)^2"
    citation = "arXiv 2202.08906, equation 5"
    properties = Properties(differentiable=True, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, coef: float = 0.001) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the logits that go into the gating; a scalar."""
        return self.coef * routing.logits_NE.logsumexp(-1).square().mean()
