"""The paper's four models: what it prints of their sizes and cost.

Reference: arXiv 2506.14038, table 1, and the FLOPs of its text: 6 (active - embedding) times the tokens, all rounded.
"""

from typing import NamedTuple


class Printed(NamedTuple):
    """Table 1 as printed, in parameters; then the 6 N T of the text."""

    embedding: int
    active: int
    total: int
    tokens: int  # of training, as rounded in the text
    flops: float  # as printed
    steps: int  # of 2^20 tokens; inferred from 19.9B and 78.6B tokens

    @property
    def product(self) -> int:
        """6 N T from printed numbers, exact: 2.84076e20 where the paper prints 2.840e20."""
        return 6 * (self.active - self.embedding) * self.tokens


_M, _B = 10**6, 10**9
PAPER = {
    "dense_m": Printed(77 * _M, 230 * _M, 230 * _M, 20 * _B, 1.836e19, 19_000),
    "moe_m": Printed(77 * _M, 230 * _M, 627 * _M, 20 * _B, 1.836e19, 19_000),
    "dense_l": Printed(154 * _M, 761 * _M, 761 * _M, 78 * _B, 2.840e20, 75_000),
    "moe_l": Printed(154 * _M, 761 * _M, 3140 * _M, 78 * _B, 2.840e20, 75_000),
}
VOCABULARY = 100_277  # of cl100k_base, unpadded
