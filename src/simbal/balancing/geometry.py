"""Penalties on the geometry of the router's rows: direction and scale together (ERNIE), or each alone.

Reference: ERNIE 4.5 (its router orthogonalisation, as in PaddleFormers); the 2 x 2 of the other two is ours.
Shapes: E experts, D model width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from simbal.balancing.base import FinishedStep, WeightLoss
from simbal.config.values import not_negative
from simbal.metrics.similarity import cosines, mean_squared_cosine
from simbal.model.router import Routing


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
