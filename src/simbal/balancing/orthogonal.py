"""Orthonormal router rows without a loss: at the start only, by construction, or as a fixed basis of the router.

Reference: arXiv 2506.14038, table 2 (OrthoInit and Param); torch.nn.utils.parametrizations.orthogonal.
Shapes: E experts, D model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

from simbal.balancing.base import Balancing, Properties
from simbal.errors import UserError
from simbal.model.router import Router

NO_LOSS = Properties(differentiable=False, scope="weights", causal=True, revives_dead_experts=False)


class OrthogonalInit(Balancing):
    """W W^T = I at the start; training is free to leave it."""

    formula = "no loss; rows of W orthonormal at the start"
    citation = "arXiv 2506.14038, table 2"
    router_init = "orthogonal"
    properties = NO_LOSS


class OrthogonalParametrization(Balancing):
    """W W^T = I at every step: W is a product of Householder reflections whose vectors are what is trained.

    In fp32 under every precision, and without weight decay, which would turn the rows towards fixed directions.
    """

    formula = "no loss; W a product of Householder reflections, rows orthonormal at every step"
    citation = "arXiv 2506.14038, table 2; torch.nn.utils.parametrizations.orthogonal"
    router_init = "orthogonal"
    sets_router_weight = True
    properties = NO_LOSS

    def prepare(self, routers: Sequence[Router]) -> None:
        """Parametrise every `router.weight_ED`, which is from here on computed from its parameter at each access.

        Raises:
            UserError: there are more experts than dimensions.
        """
        require_orthogonal_rows(routers)
        for router in routers:
            # a trivialization would hold a D x D matrix, filled from the global generator
            orthogonal(router, "weight_ED", "householder", use_trivialization=False)


class Mixture(nn.Module):
    """W = B Q as a parametrization of torch: B (E, E) is what is trained, Q (E, D) stays and is in the checkpoint."""

    def __init__(self, weight_ED: Tensor) -> None:
        """Take for Q the orthonormal rows nearest to `weight_ED`, which are those of `weight_ED` if it has such."""
        super().__init__()
        left_EE, _, right_ED = torch.linalg.svd(weight_ED.detach(), full_matrices=False)
        self.basis_ED = nn.Buffer(left_EE @ right_ED)

    def forward(self, mixture_EE: Tensor) -> Tensor:
        """Return W, (E, D)."""
        return mixture_EE @ self.basis_ED

    def right_inverse(self, weight_ED: Tensor) -> Tensor:
        """Return the B, (E, E), of a W whose rows lie in the span of Q."""
        return weight_ED @ self.basis_ED.T


class OrthogonalMixture(Balancing):
    """W = B Q with Q Q^T = I fixed and B free: any router that reads no more than an E-dimensional part of x.

    Q spans the rows of the start, where orthonormal rows make B = I. In fp32 under every precision; weight decay is
    that of a router, as |B| = |W|.
    """

    formula = "no loss; W = B Q, Q fixed with orthonormal rows, B trained from the identity"
    citation = "control"
    router_init = "orthogonal"
    sets_router_weight = True
    properties = NO_LOSS

    def prepare(self, routers: Sequence[Router]) -> None:
        """Parametrise every `router.weight_ED`, which is from here on computed from its parameter at each access.

        Raises:
            UserError: there are more experts than dimensions.
        """
        require_orthogonal_rows(routers)
        for router in routers:
            parametrize.register_parametrization(router, "weight_ED", Mixture(router.weight_ED))


def require_orthogonal_rows(routers: Sequence[Router]) -> None:
    """Raise `UserError` if a router has more experts than dimensions."""
    for num_experts, d_model in {router.weight_ED.shape for router in routers}:
        if num_experts > d_model:
            raise UserError(
                f"model.num_experts={num_experts} rows cannot be orthogonal in model.d_model={d_model} dimensions: "
                f"use at most {d_model} experts"
            )
