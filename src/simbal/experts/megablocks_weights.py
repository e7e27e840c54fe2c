"""Conversion of the experts' weights to MegaBlocks' own parameter names, and back.

MegaBlocks' SparseGLU applies `mlp.w1` as the gate, `mlp.v1` as the up and `mlp.w2` as the down projection, the experts
one below another. Our layout is the same numbers: `w2` is a view, `w1` and `v1` are the two halves of `w13`.
Reference: megablocks 0.10.0, layers/glu.py.
Shapes: E experts, F expert hidden width, D model width, M = E*F.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from simbal.errors import UserError

NAMES = ("mlp.w1", "mlp.v1", "mlp.w2")


def to_megablocks(w13_E2FD: Tensor, w2_EFD: Tensor) -> dict[str, Tensor]:
    """Return the entries of `ParallelDroplessMLP.state_dict()` by name, each (M, D)."""
    gate_EFD, up_EFD = w13_E2FD.unbind(1)
    weights = (gate_EFD, up_EFD, w2_EFD)
    return {name: w_EFD.flatten(0, 1) for name, w_EFD in zip(NAMES, weights, strict=True)}


def from_megablocks(state: Mapping[str, Tensor], num_experts: int) -> tuple[Tensor, Tensor]:
    """Return `w13_E2FD` and `w2_EFD` from the state dict of a MegaBlocks GLU.

    Raises:
        UserError: a name is missing, or the matrices do not divide into `num_experts` of one shape.
    """
    if missing := [name for name in NAMES if name not in state]:
        raise UserError(f"these are no weights of a MegaBlocks GLU: {', '.join(missing)} is missing")
    shapes = {tuple(state[name].shape) for name in NAMES}
    if len(shapes) > 1 or len(shape := shapes.pop()) != 2 or shape[0] % num_experts:
        found = ", ".join(f"{name} {tuple(state[name].shape)}" for name in NAMES)
        raise UserError(f"MegaBlocks weights {found} do not divide into {num_experts} experts of one shape")
    gate_EFD, up_EFD, w2_EFD = (state[name].view(num_experts, -1, shape[1]) for name in NAMES)
    return torch.stack([gate_EFD, up_EFD], 1), w2_EFD
