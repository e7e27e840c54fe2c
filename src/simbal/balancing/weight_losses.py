"""Losses of weights alone: of the router's rows, direction and scale together or each alone, or of the experts.

Reference: SimBal: arXiv 2506.14038, section 3.1 and the second listing of its appendix; ERNIE 4.5 (its router
orthogonalisation, as in PaddleFormers); the others are ours. Mean squared cosine is how Kim 2026 (arXiv 2601.00457)
measures the overlap of experts.
Shapes: E experts, D model width, F width of an expert, P numbers of an expert.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, FinishedStep, Properties, WeightLoss
from simbal.config.values import not_negative, one_of
from simbal.metrics.similarity import cosines, identity_deviation, mean_squared_cosine
from simbal.model.router import ExpertWeights, Router, Routing

log = logging.getLogger("simbal")
GRAM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SimBal(WeightLoss):
    """loss = coef * sum_ij |W W^T - I|_ij, entrywise, for router rows W (E, D).

    Its gradient is 2 coef S W with S = sign(W W^T - I): it needs no tokens, and is zero exactly at orthonormal rows.
    """

    citation = "arXiv 2506.14038, section 3.1"
    router_init = "orthogonal"

    def __init__(self, coef: float = 0.1, reduction: str = "sum", gram_dtype: str = "fp32") -> None:
        """Set which reading of the loss it is.

        Args:
            coef: the multiplier.
            reduction: sum over the E^2 entries (the paper), or mean.
            gram_dtype: fp32 or the weight's dtype if that is wider (recommended), or bf16, the paper's product.
        """
        super().__init__()
        self.coef, self.reduction = not_negative("coef", coef), one_of("reduction", reduction, ("sum", "mean"))
        self.gram_dtype = GRAM_DTYPES[one_of("gram_dtype", gram_dtype, [*GRAM_DTYPES])]
        self.formula = f"coef * {reduction}_ij |W W^T - I|_ij, product in {gram_dtype}"

    def prepare(self, routers: Sequence[Router]) -> None:
        """Warn where zero is out of reach, as there are more rows than dimensions."""
        for num_experts, d_model in {router.weight_ED.shape for router in routers}:
            if num_experts > d_model:
                log.warning("simbal: %d rows cannot be orthonormal in %d dimensions", num_experts, d_model)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of any router's weight, one row for each expert; a scalar."""
        wider = self.gram_dtype == torch.float32 and weight_ED.dtype == torch.float64
        deviation_EE = identity_deviation(weight_ED, weight_ED.dtype if wider else self.gram_dtype).abs()
        return self.coef * (deviation_EE.sum() if self.reduction == "sum" else deviation_EE.mean())


class ErnieOrthogonalLoss(WeightLoss):
    """loss = coef * mean_ij (n_i . n_j - 1[i = j])^2 with n_i = w_i / |w_i|: the length of a row is free.

    Decoupled: no part of the loss, but a step of its own after the optimizer's, W -= (lr) * coef * gradient.
    """

    citation = "ERNIE 4.5 technical report; PaddleFormers (both forms of the decoupled step)"

    def __init__(self, coef: float = 0.01, decoupled: bool = False, scale_by_lr: bool = True) -> None:
        """Set the multiplier and the form; `scale_by_lr`: the decoupled step is proportional to the learning rate."""
        super().__init__()
        self.coef, self.decoupled, self.scale_by_lr = not_negative("coef", coef), decoupled, scale_by_lr
        loss = "coef * mean_ij (n_i . n_j - 1[i = j])^2, n_i = w_i / |w_i|"
        rate = "lr * " if scale_by_lr else ""
        self.sets_router_weight, self.needs_lr = decoupled, decoupled and scale_by_lr
        self.formula = f"no loss; after the optimizer W -= {rate}gradient of {loss}" if decoupled else loss
        self.properties = replace(WeightLoss.properties, differentiable=not decoupled)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's router, 0 if decoupled; a scalar."""
        return routing.router_weight_ED.new_zeros(()) if self.decoupled else super().loss(routing)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight, decoupled or not; a scalar."""
        return self.coef * normalised_deviation(weight_ED)

    def update(self, step: FinishedStep) -> None:
        """Make the decoupled step on every router's weight."""
        for weight_ED in step.router_weights if self.decoupled else ():
            with torch.enable_grad():
                (gradient_ED,) = torch.autograd.grad(normalised_deviation(weight_ED), weight_ED)
            rate = (step.lr if self.scale_by_lr else 1) * step.factor * self.coef
            weight_ED.sub_(gradient_ED, alpha=rate)


class OffDiagonalCosine(WeightLoss):
    """loss = coef * mean over pairs i != j of cos^2(w_i, w_j): direction alone."""

    formula = "coef * mean over i != j of cos^2(w_i, w_j)"
    citation = "direction half of SimBal, arXiv 2506.14038"

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight; a scalar."""
        return self.coef * mean_squared_cosine(weight_ED)


class RowNorm(WeightLoss):
    """loss = coef * mean_i (|w_i| - 1)^2: scale alone."""

    formula = "coef * mean_i (|w_i| - 1)^2"
    citation = "scale half of SimBal, arXiv 2506.14038"

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight; a scalar."""
        return self.coef * row_norm_deviation(weight_ED)


def normalised_deviation(weight_ED: Tensor) -> Tensor:
    """Return mean_ij (cos(w_i, w_j) - 1[i = j])^2 of router rows; a scalar."""
    cosines_EE = cosines(weight_ED)
    return (cosines_EE - torch.eye(len(cosines_EE), dtype=cosines_EE.dtype, device=cosines_EE.device)).square().mean()


def row_norm_deviation(weight_ED: Tensor) -> Tensor:
    """Return mean_i (|w_i| - 1)^2 of router rows, in fp32 at least; a scalar."""
    rows_ED = weight_ED.to(torch.promote_types(weight_ED.dtype, torch.float32))
    deviation_E: Tensor = torch.linalg.vector_norm(rows_ED, dim=1) - 1
    return deviation_E.square().mean()


class ExpertOverlap(Balancing):
    """loss = coef * mean over pairs i != j of cos^2(v_i, v_j), v_i all weights of expert i in one vector.

    It sees weights, and not what they compute: two experts that differ in nothing but the order of their hidden units
    are the same function, and may have a cosine of 0. The router gets no gradient.
    """

    formula = "coef * mean over i != j of cos^2(v_i, v_j), v_i: gate, up and down of expert i in one vector"
    citation = "ours; the measure is that of arXiv 2601.00457"
    properties = Properties(differentiable=True, scope="weights", causal=True, revives_dead_experts=False)
    needs_experts = True

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's experts; a scalar."""
        assert routing.experts is not None, "of our own models alone"
        return self.coef * mean_squared_cosine(in_one_vector(routing.experts))


def in_one_vector(experts: ExpertWeights) -> Tensor:
    """Return all weights of each expert, (E, P)."""
    return torch.cat([experts.w13_E2FD.flatten(1), experts.w2_EFD.flatten(1)], 1)
