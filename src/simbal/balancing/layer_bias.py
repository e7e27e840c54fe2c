"""A number for each layer and expert that a strategy keeps.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.errors import UserError
from simbal.model.router import Router


def layer_bias(bias_LE: Tensor, routers: Sequence[Router]) -> Tensor:
    """`bias_LE` itself if it fits the routers; zeros that do, of its dtype, if it has no elements.

    Raises:
        UserError: it was made for another model.
    """
    shape = (len(routers), len(routers[0].weight_ED)) if routers else tuple(bias_LE.shape)
    if not bias_LE.numel():
        return torch.zeros(shape, dtype=bias_LE.dtype, device=bias_LE.device)
    if tuple(bias_LE.shape) != shape:
        made, model = (f"num_layers={layers} and num_experts={experts}" for layers, experts in (bias_LE.shape, shape))
        raise UserError(f"the strategy was made for {made}, but the model has {model}")
    return bias_LE
