"""Measures of the similarity of experts' outputs, and of the distance of a router's rows from orthonormality.

Functions of a router's weight keep leading dimensions, such as layers.
Reference: arXiv 2506.14038; section 4.1 defines the pairwise expert similarity (PES).
Shapes: N tokens, D model width, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class RunningSimilarity:
    """The mean cosine over pairs of experts, C = (|sum_i u_i|^2 - sum_i |u_i|^2) / (E (E-1)), u_i = f_i(x) / |f_i(x)|.

    This equals the mean over all E (E-1) / 2 pairs, but its cost is linear in E, because it adds one expert at a time
    and keeps only the sum of the directions u_i. For an output of length 0, u_i = 0, so its pairs count as cosine 0.
    C is in [-1/(E-1), 1] up to rounding, in at least fp32.
    """

    def __init__(self) -> None:
        self.num_experts = 0
        self.sum_ND, self.directed_N = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def add(self, output_ND: Tensor) -> None:
        """Add one expert's outputs for all tokens, before they are multiplied by the router's weights."""
        wide_ND = output_ND.to(torch.promote_types(output_ND.dtype, torch.float32))
        # divide by the largest entry first, because squares of numbers below 1e-23 are 0 in fp32
        largest_N1 = wide_ND.abs().amax(1, keepdim=True)
        directed_N1 = largest_N1 > 0
        scaled_ND = wide_ND / largest_N1.where(directed_N1, 1)
        norm_N1 = torch.linalg.vector_norm(scaled_ND, dim=1, keepdim=True)
        self.sum_ND = self.sum_ND.to(output_ND.device) + scaled_ND / norm_N1.where(directed_N1, 1)
        self.directed_N = self.directed_N.to(output_ND.device) + directed_N1[:, 0]
        self.num_experts += 1

    @property
    def similarity_N(self) -> Tensor:
        """C of each token, (N,), over the experts added so far."""
        assert self.num_experts >= 2, "similarity needs two experts"
        pairs_twice = self.num_experts * (self.num_experts - 1)
        similarity_N: Tensor = (self.sum_ND.square().sum(1) - self.directed_N) / pairs_twice
        return similarity_N

    @property
    def zero_outputs(self) -> int:
        """The number of outputs of length 0 over all experts and tokens."""
        return int((self.num_experts - self.directed_N).sum())


def identity_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Return W W^T - I, (E, E): product in `gram_dtype` regardless of autocast, difference in at least fp32."""
    with torch.autocast(weight_ED.device.type, enabled=False):
        rows_ED = weight_ED.to(gram_dtype)
        gram_EE = (rows_ED @ rows_ED.mT).to(torch.promote_types(gram_dtype, torch.float32))
        return gram_EE - torch.eye(gram_EE.shape[-1], dtype=gram_EE.dtype, device=gram_EE.device)


def max_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Return the paper's Max Dev: the largest absolute entry of W W^T - I."""
    return identity_deviation(weight_ED, gram_dtype).abs().amax((-2, -1))


def mean_deviation(weight_ED: Tensor, gram_dtype: torch.dtype) -> Tensor:
    """Return the paper's L1 Dist: the mean absolute value of the E^2 entries of W W^T - I."""
    return identity_deviation(weight_ED, gram_dtype).abs().mean((-2, -1))


def mean_squared_deviation(weight_ED: Tensor, gram_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the paper's (R^T R - I)^2: the mean square of the E^2 entries of W W^T - I."""
    return identity_deviation(weight_ED, gram_dtype).square().mean((-2, -1))


def row_norms(weight_ED: Tensor) -> Tensor:
    """Return the Euclidean length of each row, (E,), in fp64."""
    norms_E: Tensor = torch.linalg.vector_norm(weight_ED.double(), dim=-1)
    return norms_E


def cosines(weight_ED: Tensor) -> Tensor:
    """Return cos(w_i, w_j), (E, E), in at least fp32 regardless of autocast; 0 for a row of zeros."""
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
    """Return the largest absolute cosine of two rows: 0 if all rows are orthogonal, 1 if two are parallel."""
    return off_diagonal_cosines(weight_ED).abs().amax((-2, -1))


def mean_squared_cosine(weight_ED: Tensor) -> Tensor:
    """Return the mean squared cosine over the E(E-1) pairs of different rows, about 1/D for random rows."""
    num_experts = weight_ED.shape[-2]
    return off_diagonal_cosines(weight_ED).square().sum((-2, -1)) / max(1, num_experts * (num_experts - 1))
