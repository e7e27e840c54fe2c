"""How alike the experts' answers to the same token are.

Reference: pairwise expert similarity (PES), arXiv 2506.14038, section 4.1.
Shapes: N tokens, D model width, E experts.
"""

import torch
from torch import Tensor


class RunningSimilarity:
    """C(x) = (|sum_i u_i|^2 - sum_i |u_i|^2) / (E (E-1)), u_i = f_i(x) / |f_i(x)|: the mean cosine over expert pairs.

    Exactly the mean over all E (E-1) / 2 pairs, at a cost linear in E: the experts come one at a time, and only the sum
    of their directions is kept. An output of length 0 has no direction: u_i = 0, so its pairs count as cosine 0.
    In [-1/(E-1), 1] up to rounding, in at least fp32.
    """

    def __init__(self) -> None:
        self.num_experts = 0
        self.sum_ND, self.directed_N = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def add(self, output_ND: Tensor) -> None:
        """One more expert's outputs, without the router's weight."""
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
        """C of each token."""
        assert self.num_experts >= 2, "one expert alone is in no pair"
        pairs_twice = self.num_experts * (self.num_experts - 1)
        similarity_N: Tensor = (self.sum_ND.square().sum(1) - self.directed_N) / pairs_twice
        return similarity_N

    @property
    def zero_outputs(self) -> int:
        """How many outputs had length 0."""
        return int((self.num_experts - self.directed_N).sum())
