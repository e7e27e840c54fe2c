"""Measures of how alike the experts' outputs for one token are, and of how far a router's rows are from orthonormal.

Reference: arXiv 2506.14038; pairwise expert similarity (PES) is defined in section 4.1.
Shapes: N tokens, D model width, E experts. Functions of a router's weight keep its leading dimensions (layers, say).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class RunningSimilarity:
    """The mean cosine of pairs of experts, C = (|sum_i u_i|^2 - sum_i |u_i|^2) / (E (E-1)), u_i = f_i(x) / |f_i(x)|.

    It is exactly the mean over all E (E-1) / 2 pairs, at a cost linear in E: the experts come one at a time, and only
    the sum of their directions is kept. An output of length 0 has no direction: u_i = 0, so its pairs count as cosine
    0. C is in [-1/(E-1), 1] up to rounding, in at least fp32.
    """

    def __init__(self) -> None:
        self.num_experts = 0
        self.sum_ND, self.directed_N = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def add(self, output_ND: Tensor) -> None:
        """Add the outputs of one more expert for all tokens, before the router's weight."""
        wide_ND = output_ND.to(torch.promote_types(output_ND.dtype, torch.float32))
        # by the largest entry first: squares of numbers below 1e-23 are 0 in fp32, and so would their norm be
        largest_N1 = wide_ND.abs().amax(1, keepdim=True)
        directed_N1 = largest_N1 > 0
        scaled_ND = wide_ND / largest_N1.where(directed_N1, 1)
        norm_N1 = torch.linalg.vector_norm(scaled_ND, dim=1, keepdim=True)
        self.sum_ND = self.sum_ND.to(output_ND.device) + scaled_ND / norm_N1.where(directed_N1, 1)
        self.directed_N = self.directed_N.to(output_ND.device) + directed_N1[:, 0]
        self.num_experts += 1

    @property
    def similarity_N(self) -> Tensor:
        """The C of each token, (N,), over the experts added so far."""
        assert self.num_experts >= 2, "one expert alone is in no pair"
        pairs_twice = self.num_experts * (self.num_experts - 1)
        similarity_N: Tensor = (self.sum_ND.square().sum(1) - self.directed_N) / pairs_twice
        return similarity_N

    @property
    def zero_outputs(self) -> int:
        """The number of outputs of length 0, over all experts and tokens."""
        return int((self.num_experts - self.directed_N).sum())


def identity_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Return W W^T - I, (E, E): the product in `gram_dtype` under every autocast, the difference in at least fp32."""
    with torch.autocast(weight_ED.device.type, enabled=False):
        rows_ED = weight_ED.to(gram_dtype)
        gram_EE = (rows_ED @ rows_ED.mT).to(torch.promote_types(gram_dtype, torch.float32))
        return gram_EE - torch.eye(gram_EE.shape[-1], dtype=gram_EE.dtype, device=gram_EE.device)


def max_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Return Max Dev of the paper: the largest absolute entry of W W^T - I."""
    return identity_deviation(weight_ED, gram_dtype).abs().amax((-2, -1))


def mean_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Return L1 Dist of the paper: the mean absolute entry of W W^T - I, over all E^2 of them."""
    return identity_deviation(weight_ED, gram_dtype).abs().mean((-2, -1))


def mean_squared_deviation(weight_ED: Tensor, gram_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return (R^T R - I)^2 of the paper: the mean squared entry of W W^T - I, over all E^2 of them."""
    return identity_deviation(weight_ED, gram_dtype).square().mean((-2, -1))


def row_norms(weight_ED: Tensor) -> Tensor:
    """Return the length of each row, (E,), in fp64; SimBal pulls it to 1."""
    norms_E: Tensor = torch.linalg.vector_norm(weight_ED.double(), dim=-1)
    return norms_E


def cosines(weight_ED: Tensor) -> Tensor:
    """Return cos(w_i, w_j), (E, E), in at least fp32 under every autocast; 0 for a row that is 0."""
    with torch.autocast(weight_ED.device.type, enabled=False):
        rows_ED = weight_ED.to(torch.promote_types(weight_ED.dtype, torch.float32))
        shortest = torch.finfo(rows_ED.dtype).tiny ** 0.5  # the squares of a shorter row underflow
        rows_ED = F.normalize(rows_ED, dim=-1, eps=shortest)
        return rows_ED @ rows_ED.mT


def off_diagonal_cosines(weight_ED: Tensor) -> Tensor:
    """Return `cosines` with 0 on the diagonal, (E, E)."""
    cosines_EE = cosines(weight_ED)
    return cosines_EE - torch.diag_embed(cosines_EE.diagonal(dim1=-2, dim2=-1))


def max_cosine(weight_ED: Tensor) -> Tensor:
    """Return the largest absolute cosine between two rows: 0 if orthogonal, 1 if two are parallel."""
    return off_diagonal_cosines(weight_ED).abs().amax((-2, -1))


def mean_squared_cosine(weight_ED: Tensor) -> Tensor:
    """Return the mean squared cosine over the E(E-1) pairs of different rows; about 1/D for random rows."""
    num_experts = weight_ED.shape[-2]
    return off_diagonal_cosines(weight_ED).square().sum((-2, -1)) / max(1, num_experts * (num_experts - 1))
