"""Experiments on how to balance the router of a Mixture-of-Experts language model.

`simbal.train` and `simbal.sweep` train from Python, `simbal.load` reads runs: see `simbal.api`, which is
imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simbal.api import Rows, Run, Sweep, load, sweep, train

__all__ = ["Rows", "Run", "Sweep", "load", "sweep", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'simbal' has no attribute {name!r}")
    return getattr(import_module("simbal.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
