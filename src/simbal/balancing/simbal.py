"""SimBal: keep the router's rows orthonormal, so that similar tokens go to similar experts.

Reference: arXiv 2506.14038, section 3.1 and the second listing of its appendix.
Shapes: E experts, D model width.
"""

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, checked_coef
from simbal.errors import UserError
from simbal.metrics.orthogonality import identity_deviation
from simbal.model.router import Routing

GRAM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SimBal(Balancing):
    """loss = coef * sum_ij |W W^T - I|_ij, entrywise, for router rows W (E, D).

    Its gradient is 2 coef S W with S = sign(W W^T - I): it needs no tokens, and is zero exactly at orthonormal rows.
    """

    formula = "coef * sum_ij |W W^T - I|_ij"
    citation = "arXiv 2506.14038, section 3.1"
    data_free = True
    router_init = "orthogonal"

    def __init__(self, coef: float, gram_dtype: str) -> None:
        """`gram_dtype`: fp32 (recommended), or bf16, the precision of the paper's product."""
        super().__init__()
        self.coef = checked_coef("simbal", coef)
        if gram_dtype not in GRAM_DTYPES:
            raise UserError(f"balancing.simbal.gram_dtype={gram_dtype} is not one of {', '.join(GRAM_DTYPES)}")
        self.gram_dtype = GRAM_DTYPES[gram_dtype]

    def loss(self, routing: Routing) -> Tensor:
        """Depends on the router's weight alone."""
        return self.coef * orthogonality_loss(routing.router_weight_ED, self.gram_dtype)


def orthogonality_loss(weight_ED: Tensor, gram_dtype: torch.dtype = torch.float32) -> Tensor:
    """sum_ij |W W^T - I|_ij, the product in `gram_dtype` and the rest in fp32."""
    return identity_deviation(weight_ED, gram_dtype).abs().sum()
