"""State that stays in its own precision when a model is cast."""

from collections.abc import Callable

from torch import Tensor


def device_only(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The part of `cast` (as `nn.Module._apply` gets it) that moves between devices, without its change of dtype."""
    return lambda tensor: tensor.to(cast(tensor.new_empty(0)).device)
