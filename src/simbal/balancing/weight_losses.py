"""Losses on weights: SimBal and its components on the router's rows, and the overlap of expert weights.

Reference: SimBal: arXiv 2506.14038, section 3.1 and the second listing of its appendix; ERNIE 4.5 (its router
orthogonalization, as in PaddleFormers); Kim 2026 (arXiv 2601.00457) measures the overlap of experts by the mean squared
cosine. The other losses are our own.
Shapes: E experts, D model width, F width of an expert, P parameters of an expert.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from simbal.balancing.base import DTYPES, Balancing, FinishedStep, Properties, WeightLoss
from simbal.config.values import check_choice, check_nonnegative
from simbal.metrics.similarity import cosines, identity_deviation, mean_squared_cosine
from simbal.model.router import Router, Routing

log = logging.getLogger("simbal")


class SimBal(WeightLoss):
    """loss = coef * sum_ij |W W^T - I|_ij, entrywise, for router rows W (E, D).

    Its gradient is 2 coef S W with S = sign(W W^T - I). The loss does not depend on tokens and is zero if and only if
    the rows are orthonormal.
    """

    citation = "arXiv 2506.14038, section 3.1"
    router_init = "orthogonal"

    def __init__(self, coef: float = 0.1, reduction: str = "sum", gram_dtype: str = "fp32") -> None:
        """Select a variant of the loss.

        Args:
            coef: multiplier.
            reduction: sum over the E^2 entries (paper), or mean.
            gram_dtype: dtype of W W^T: fp32, or the weight's dtype if wider (recommended), or bf16 (paper).
        """
        super().__init__()
        self.coef = check_nonnegative("coef", coef)
        self.reduction = check_choice("reduction", reduction, ("sum", "mean"))
        self.gram_dtype = DTYPES[check_choice("gram_dtype", gram_dtype, [*DTYPES])]
        self.formula = f"coef * {reduction}_ij |W W^T - I|_ij, product in {gram_dtype}"

    def prepare(self, routers: Sequence[Router]) -> None:
        """Warn if there are more rows than dimensions, so that the loss cannot reach zero."""
        for num_experts, d_model in {router.weight_ED.shape for router in routers}:
            if num_experts > d_model:
                log.warning("simbal: %d rows cannot be orthonormal in %d dimensions", num_experts, d_model)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of any router's weight with one row per expert, a scalar."""
        wider = self.gram_dtype == torch.float32 and weight_ED.dtype == torch.float64
        deviation_EE = identity_deviation(weight_ED, weight_ED.dtype if wider else self.gram_dtype).abs()
        return self.coef * (deviation_EE.sum() if self.reduction == "sum" else deviation_EE.mean())


class ErnieOrthogonalLoss(WeightLoss):
    """loss = coef * mean_ij (n_i . n_j - 1[i = j])^2 with n_i = w_i / |w_i|; the lengths of the rows are free.

    The decoupled form adds no loss. Instead it applies W -= (lr) * coef * gradient after the optimizer step.
    """

    citation = "ERNIE 4.5 technical report; PaddleFormers (both forms of the decoupled step)"

    def __init__(self, coef: float = 0.01, decoupled: bool = False, scale_by_lr: bool = True) -> None:
        """Set the multiplier and the form; `scale_by_lr` multiplies the decoupled step by the learning rate."""
        super().__init__()
        self.coef, self.decoupled, self.scale_by_lr = check_nonnegative("coef", coef), decoupled, scale_by_lr
        loss = "coef * mean_ij (n_i . n_j - 1[i = j])^2, n_i = w_i / |w_i|"
        rate = "lr * " if scale_by_lr else ""
        self.sets_router_weight, self.needs_lr = decoupled, decoupled and scale_by_lr
        self.formula = f"no loss; after the optimizer W -= {rate}gradient of {loss}" if decoupled else loss
        self.properties = replace(WeightLoss.properties, differentiable=not decoupled)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's router, a scalar; 0 if decoupled."""
        return routing.router_weight_ED.new_zeros(()) if self.decoupled else super().loss(routing)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight, a scalar, whether decoupled or not."""
        return self.coef * normalized_deviation(weight_ED)

    def update(self, step: FinishedStep) -> None:
        """Apply the decoupled step to every router's weight."""
        for weight_ED in step.router_weights if self.decoupled else ():
            with torch.enable_grad():
                (gradient_ED,) = torch.autograd.grad(normalized_deviation(weight_ED), weight_ED)
            rate = (step.lr if self.scale_by_lr else 1) * step.factor * self.coef
            weight_ED.sub_(gradient_ED, alpha=rate)


class OffDiagonalCosine(WeightLoss):
    """loss = coef * mean over pairs i != j of cos^2(w_i, w_j). It ignores the lengths of the rows."""

    formula = "coef * mean over i != j of cos^2(w_i, w_j)"
    citation = "direction half of SimBal, arXiv 2506.14038"

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = check_nonnegative("coef", coef)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight, a scalar."""
        return self.coef * mean_squared_cosine(weight_ED)


class RowNorm(WeightLoss):
    """loss = coef * mean_i (|w_i| - 1)^2. It ignores the directions of the rows."""

    formula = "coef * mean_i (|w_i| - 1)^2"
    citation = "scale half of SimBal, arXiv 2506.14038"

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = check_nonnegative("coef", coef)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight, a scalar."""
        rows_ED = weight_ED.to(torch.promote_types(weight_ED.dtype, torch.float32))
        deviation_E: Tensor = torch.linalg.vector_norm(rows_ED, dim=1) - 1
        return self.coef * deviation_E.square().mean()


def normalized_deviation(weight_ED: Tensor) -> Tensor:
    """Return mean_ij (cos(w_i, w_j) - 1[i = j])^2 of router rows, a scalar."""
    cosines_EE = cosines(weight_ED)
    return (cosines_EE - torch.eye(len(cosines_EE), dtype=cosines_EE.dtype, device=cosines_EE.device)).square().mean()


class ExpertOverlap(Balancing):
    """loss = coef * mean over pairs i != j of cos^2(v_i, v_j), where v_i is the vector of all weights of expert i.

    The loss compares weights, not functions: permuting an expert's hidden units keeps its function but may change the
    cosine to 0. The router gets no gradient.
    """

    formula = "coef * mean over i != j of cos^2(v_i, v_j), v_i: gate, up and down of expert i in one vector"
    citation = "our own; measure of arXiv 2601.00457"
    properties = Properties(differentiable=True, scope="weights", causal=True, revives_dead_experts=False)
    needs_experts = True

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = check_nonnegative("coef", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's experts, a scalar."""
        experts = routing.experts
        assert experts is not None, "ExpertOverlap needs a simbal model"
        vectors_EP = torch.cat([experts.w13_E2FD.flatten(1), experts.w2_EFD.flatten(1)], 1)
        return self.coef * mean_squared_cosine(vectors_EP)
