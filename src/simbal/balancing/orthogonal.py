"""Orthonormal router rows without a loss: at the start only, or by construction.

Reference: arXiv 2506.14038, table 2 (OrthoInit and Param); torch.nn.utils.parametrizations.orthogonal.
Shapes: E experts, D model width.
"""

from collections.abc import Sequence

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
        for router in routers:
            num_experts, d_model = router.weight_ED.shape
            if num_experts > d_model:
                raise UserError(
                    f"model.num_experts={num_experts} rows cannot be orthogonal in model.d_model={d_model} dimensions: "
                    f"use at most {d_model} experts"
                )
            # a trivialization would hold a D x D matrix, filled from the global generator
            orthogonal(router, "weight_ED", "householder", use_trivialization=False)
