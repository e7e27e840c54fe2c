"""How far a router's rows are from orthonormal; of a batch of routers (..., E, D), how far each of them is.

Reference: arXiv 2506.14038, tables 2, 9 and 10; that they use a bf16 product is inferred from their digits.
Shapes: E experts, D model width.
"""

import torch
from torch import Tensor


def identity_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """W W^T - I, (E, E): the product in `gram_dtype` under every autocast, the difference in at least fp32."""
    with torch.autocast(weight_ED.device.type, enabled=False):
        rows_ED = weight_ED.to(gram_dtype)
        gram_EE = (rows_ED @ rows_ED.mT).to(torch.promote_types(gram_dtype, torch.float32))
        return gram_EE - torch.eye(gram_EE.shape[-1], dtype=gram_EE.dtype, device=gram_EE.device)


def max_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Max Dev of the paper: the largest absolute deviation of the E^2 entries."""
    return identity_deviation(weight_ED, gram_dtype).abs().amax((-2, -1))


def mean_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """L1 Dist of the paper: the mean absolute deviation over all E^2 entries."""
    return identity_deviation(weight_ED, gram_dtype).abs().mean((-2, -1))


def mean_squared_deviation(weight_ED: Tensor, gram_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(R^T R - I)^2 of the paper: the mean of the squared deviation over all E^2 entries."""
    return identity_deviation(weight_ED, gram_dtype).square().mean((-2, -1))


def row_norms(weight_ED: Tensor) -> Tensor:
    """Length of each row, (E,), in fp64; SimBal pulls it to 1."""
    norms_E: Tensor = torch.linalg.vector_norm(weight_ED.double(), dim=-1)
    return norms_E


def off_diagonal_cosines(weight_ED: Tensor) -> Tensor:
    """(E, E), fp64: cosines between rows whatever their lengths; 0 on the diagonal, and for a row that is 0."""
    rows_ED = weight_ED.double()
    rows_ED = rows_ED / row_norms(weight_ED)[..., None].clamp_min(torch.finfo(torch.float64).tiny)
    cosines_EE = rows_ED @ rows_ED.mT
    return cosines_EE - torch.diag_embed(cosines_EE.diagonal(dim1=-2, dim2=-1))


def max_cosine(weight_ED: Tensor) -> Tensor:
    """Largest absolute cosine between two rows: 0 if orthogonal, 1 if two are parallel."""
    return off_diagonal_cosines(weight_ED).abs().amax((-2, -1))


def mean_squared_cosine(weight_ED: Tensor) -> Tensor:
    """Mean of the squared cosine over the E(E-1) pairs of different rows; about 1/D for random rows."""
    num_experts = weight_ED.shape[-2]
    return off_diagonal_cosines(weight_ED).square().sum((-2, -1)) / max(1, num_experts * (num_experts - 1))
