"""Orthonormal router rows without a loss: as an initialization, by construction, or as a fixed basis of the router.

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
    """W W^T = I at initialization, without any constraint during training."""

    formula = "no loss; rows of W orthonormal at initialization"
    citation = "arXiv 2506.14038, table 2"
    router_init = "orthogonal"
    properties = NO_LOSS


class OrthogonalParametrization(Balancing):
    """W W^T = I at every step: W is a product of Householder reflections with trainable vectors.

    W is in fp32 under every precision. Weight decay is off, because it would rotate the rows toward fixed directions.
    """

    formula = "no loss; W a product of Householder reflections, rows orthonormal at every step"
    citation = "arXiv 2506.14038, table 2; torch.nn.utils.parametrizations.orthogonal"
    router_init = "orthogonal"
    sets_router_weight = True
    properties = NO_LOSS

    def prepare(self, routers: Sequence[Router]) -> None:
        """Parametrize every `router.weight_ED`, which is then recomputed from its parameter at each access.

        Raises:
            UserError: there are more experts than dimensions.
        """
        require_orthogonal_rows(routers)
        for router in routers:
            # a trivialization would store a D x D matrix, initialized with the global random generator
            orthogonal(router, "weight_ED", "householder", use_trivialization=False)


class Mixture(nn.Module):
    """The parametrization W = B Q with a trainable B, (E, E), and a fixed buffer Q, (E, D)."""

    def __init__(self, weight_ED: Tensor) -> None:
        """Set Q to the orthonormal rows nearest to `weight_ED`, the orthogonal factor of its polar decomposition."""
        super().__init__()
        left_EE, _, right_ED = torch.linalg.svd(weight_ED.detach(), full_matrices=False)
        self.basis_ED = nn.Buffer(left_EE @ right_ED)

    def forward(self, mixture_EE: Tensor) -> Tensor:
        """Return W, (E, D)."""
        return mixture_EE @ self.basis_ED

    def right_inverse(self, weight_ED: Tensor) -> Tensor:
        """Return B, (E, E), for a W whose rows lie in the span of Q."""
        return weight_ED @ self.basis_ED.T


class OrthogonalMixture(Balancing):
    """W = B Q with a fixed Q, Q Q^T = I, and a free B: the router sees only an E-dimensional subspace of x.

    Q spans the initial rows; orthonormal initial rows give B = I. W is in fp32 under every precision. Weight decay acts
    as on an unparametrized router, because |B| = |W|.
    """

    formula = "no loss; W = B Q, Q fixed with orthonormal rows, B trained from the identity"
    citation = "control"
    router_init = "orthogonal"
    sets_router_weight = True
    properties = NO_LOSS

    def prepare(self, routers: Sequence[Router]) -> None:
        """Parametrize every `router.weight_ED`, which is then recomputed from its parameter at each access.

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
