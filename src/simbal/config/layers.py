"""The keys of a strategy that select its layers. No torch here, because a sweep checks them before the first job."""

from collections.abc import Mapping
from typing import Any

from simbal.config.values import check_integer
from simbal.errors import UserError

LAYER_KEYS = ("layers", "first", "after")
COMMON_KEYS = ("_target_", "schedule", *LAYER_KEYS)  # keys of every strategy, which its class does not take


def selected_layers(prefix: str, keys: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers of a strategy in ascending order, or None if it acts in all layers.

    Args:
        prefix: the dotted key of the strategy with a final dot, such as `balancing.lf.`.
        keys: the keys of the strategy: `layers` (a list), `first` (the first n layers) or `after` (all but these).
        num_layers: number of MoE layers of the model.

    Raises:
        UserError: two of the keys are set, or the model does not have these layers.
    """
    given = {key: keys[key] for key in LAYER_KEYS if keys.get(key) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise UserError(f"{prefix}{' and '.join(given)} both select layers: set one of {', '.join(LAYER_KEYS)}")
    (key, value), every_layer = *given.items(), range(num_layers)
    if key != "layers":
        number = check_integer(f"{prefix}{key}", value, 1, num_layers - (key == "after"))
        return tuple(every_layer[:number] if key == "first" else every_layer[number:])
    if not isinstance(value, list) or not value or any(type(layer) is not int for layer in value):
        raise UserError(f"{prefix}layers={value} must be a list of layers, such as [0,1]")
    if len({*value}) < len(value) or not {*value} <= {*every_layer}:
        raise UserError(f"{prefix}layers={value} must be different numbers from 0 to {num_layers - 1}")
    return tuple(sorted(value))
