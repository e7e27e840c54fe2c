"""SimBal: keep the router's rows orthonormal, so that similar tokens go to similar experts.

Reference: arXiv 2506.14038, section 3.1 and the second listing of its appendix.
Shapes: E experts, D model width.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.balancing.base import WeightLoss
from simbal.config.values import not_negative, one_of
from simbal.metrics.similarity import identity_deviation
from simbal.model.router import Router

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
