"""Strategies that change the logits: cosine router, prototypes, logit normalization, temperature, Sinkhorn.

Reference: X-MoE (arXiv 2204.09179) and tutel's CosineTopKGate, without their projection of x to fewer channels and
their learned scale; the online k-means router of arXiv 2605.12476, from its abstract, with our own decay, scale and
initialization; gating logit normalization: Skywork-MoE (arXiv 2406.06563); Sinkhorn: S-BASE (Clark et al. 2022, arXiv
2202.01169), as in Megatron-LM.
Shapes: N tokens, L MoE layers, E experts, D model width.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.config.values import check_fraction, check_integer, check_positive
from simbal.errors import UserError
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Candidates, Router, Routing, linear_logits

VARIANCE_FLOOR = 1e-12  # for tokens with equal logits


class CosineRouter(Balancing):
    """logits = scale * cos(x, w_i): the length of a row does not affect the logits."""

    formula = "no loss; logits = scale * cos(x, w_i)"
    citation = "arXiv 2204.09179, without its projection and with a fixed scale"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, scale: float = 10.0) -> None:
        """Set the maximum logit, `scale`."""
        super().__init__()
        self.scale = check_positive("scale", scale)

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the scaled cosines, (N, E); 0 for a zero vector."""
        return self.scale * F.linear(F.normalize(x_ND, dim=-1), F.normalize(weight_ED, dim=-1))


class PrototypeRouter(CosineRouter):
    """logits = scale * cos(x, w_i); after each step w_i = decay * w_i + (1 - decay) * mean of the x that chose i.

    The prototypes are the rows of the router's weight W. W is initialized by `router.init`, gets no gradient, optimizer
    step or weight decay, and is saved like any weight. The mean is over all tokens of the step. A token counts fully
    for each of its K experts, and an expert without tokens keeps its row. With precision bf16-true, W is in bf16 and
    loses relative changes below 1/256.

    Cost: one more matrix product of the router's size, and the router's input (N, D) stays in memory until it is
    measured. The backward pass stores this input anyway, unless activations are recomputed.
    """

    formula = "no loss; logits = scale * cos(x, w_i), w_i: running mean over steps of the mean x that chose i"
    citation = "arXiv 2605.12476; our own decay, scale and initialization"
    sets_router_weight = True
    properties = Properties(differentiable=False, scope="global", causal=True, revives_dead_experts=False)

    def __init__(self, decay: float = 0.99, scale: float = 10.0) -> None:
        """Set the fraction of the old row that is kept, `decay` in [0, 1), and the maximum logit, `scale`."""
        super().__init__(scale)
        self.decay = check_fraction("decay", decay)

    def prepare(self, routers: Sequence[Router]) -> None:
        """Freeze every router's weight, and make every router include its input in the routing."""
        for router in routers:
            router.weight_ED.requires_grad_(False)
            router.keeps_input = True

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the sum and the number of the hidden states that chose each expert, (L, E, D+1)."""
        return torch.stack([sums_and_number(routing) for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Move the prototypes toward the means of the step."""
        for weight_ED, measured_EM in zip(step.router_weights, step.measured_LE, strict=True):
            sums_ED, number_E1 = measured_EM[:, :-1], measured_EM[:, -1:]
            moved_ED = torch.lerp(sums_ED / number_E1, weight_ED.to(sums_ED.dtype), self.decay)
            weight_ED.copy_(torch.where(number_E1 > 0, moved_ED, weight_ED))


def sums_and_number(routing: Routing) -> Tensor:
    """Return the sum and the number of the hidden states that chose each expert, (E, D+1), in at least fp32."""
    assert routing.x_ND is not None, "`prepare` sets keeps_input"
    x_ND = routing.x_ND.to(torch.promote_types(routing.x_ND.dtype, torch.float32))
    chosen_NE = chosen_experts(routing.topk_experts_NK, routing.logits_NE.shape[1]).to(x_ND.dtype)
    with torch.autocast(x_ND.device.type, enabled=False):
        return torch.cat([chosen_NE.T @ x_ND, chosen_NE.sum(0)[:, None]], 1)


class LogitNorm(Balancing):
    """logits' = scale * (logits - mean) / std over the experts of each token, before the gating."""

    formula = "no loss; logits' = scale * (logits - mean_E) / std_E before the gating"
    citation = "arXiv 2406.06563"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = check_positive("scale", scale)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the normalized logits, (N, E); the variance divides by E, not E - 1."""
        centered_NE = logits_NE - logits_NE.mean(-1, keepdim=True)
        variance_N1 = centered_NE.square().mean(-1, keepdim=True)
        return self.scale * centered_NE * (variance_N1 + VARIANCE_FLOOR).rsqrt()


class Temperature(Balancing):
    """logits = x W^T / T_l in MoE layer l; T_l < 1 sharpens the weights, T_l > 1 flattens them."""

    formula = "no loss; logits = x W^T / T, T of the layer"
    citation = "control"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, temperature: float = 0.5, of_layers: list[float] | None = None) -> None:
        """Set one T for all layers, or one per MoE layer with `of_layers`."""
        super().__init__()
        self.temperature, self.of_layers = check_positive("temperature", temperature), of_layers
        for of_layer in of_layers or []:
            check_positive("of_layers", of_layer)

    def prepare(self, routers: Sequence[Router]) -> None:
        """Raise `UserError` unless `of_layers` has one value per layer."""
        if self.of_layers is not None and len(self.of_layers) != len(routers):
            raise UserError(
                f"of_layers={self.of_layers} has {len(self.of_layers)} temperatures for {len(routers)} layers: "
                "set one per layer, or null"
            )

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits divided by the layer's temperature, (N, E)."""
        of_layer = self.temperature if self.of_layers is None else self.of_layers[layer]
        return linear_logits(x_ND, weight_ED, layer) / of_layer


class Sinkhorn(Balancing):
    """choice = top K of z_te + v_e, where u, v make exp(z_te + u_t + v_e) sum to 1 for each t and to N/E for each e.

    Only in training; evaluation uses the plain top K. Not causal: v depends on all tokens of the micro-batch.
    """

    citation = "arXiv 2202.01169"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=True)

    def __init__(self, iterations: int = 10) -> None:
        super().__init__()
        self.iterations = check_integer("iterations", iterations, 1)
        self.formula = f"no loss; in training choice by logits + v, v from {iterations} Sinkhorn iterations"

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return logits plus v, (N, E), in training, and the logits in evaluation."""
        logits_NE = candidates.logits_NE
        return logits_NE + expert_potential(logits_NE, self.iterations) if self.training else logits_NE


def expert_potential(logits_NE: Tensor, iterations: int) -> Tensor:
    """Return v, (E,), from alternating normalization of rows and columns in log space, columns last."""
    num_tokens, num_experts = logits_NE.shape
    v_E = logits_NE.new_zeros(num_experts)
    for _ in range(iterations):
        u_N1 = -torch.logsumexp(logits_NE + v_E, 1, keepdim=True)
        v_E = math.log(num_tokens / num_experts) - torch.logsumexp(logits_NE + u_N1, 0)
    return v_E
