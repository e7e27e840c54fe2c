"""What `experts=auto` goes by: which backend was measured to be the fastest, where; a row changes with a measurement.

`make gpu-check` prints the rows of a GPU.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """The fastest backend for a device, a dtype and widths (None: any); the first row that fits counts."""

    device: str
    dtype: torch.dtype
    d_model: int | None
    d_expert: int | None
    backend: str
    measurement: str

    def fits(self, device: str, dtype: torch.dtype, d_model: int, d_expert: int) -> bool:
        """Whether the row speaks of these."""
        widths = ((self.d_model, d_model), (self.d_expert, d_expert))
        same = all(measured in (None, asked) for measured, asked in widths)
        return same and (self.device, self.dtype) == (device, dtype)


TABLE = (
    Row(
        "cpu", torch.float32, None, None, "torch",
        "as fast as reference within 8%, with a third of its activations",
    ),  # forward and backward on one thread, median of 8, balanced and skewed: 15.9 and 14.5 ms to 15.6 and 15.5 at
    # D 128, F 64, E 16, N 1024; 165 and 155 to 152 and 155 at D 256, F 256, E 32, N 2048 (torch 2.13, November 2026)
)  # fmt: skip
UNMEASURED = {"cuda": ("megablocks", "torch", "fused", "reference"), "cpu": ("torch", "reference")}
"""By device: what to try, in this order, where no row fits or its backend cannot run."""
