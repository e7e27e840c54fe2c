"""Makes the launchers of submitit and Ray wait for every job.

They ask for the results one by one. A job that was killed has none: it raises, and those behind it are no longer waited
for; Ray's then die with the sweep.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# by the launcher's package: where it asks for a result, how, and what stands for none
RESULTS: dict[str, tuple[str, str, Any]] = {
    "hydra_plugins.hydra_submitit_launcher": ("submitit.core.core:Job", "results", [None]),
    "hydra_plugins.hydra_ray_launcher": ("ray", "get", None),
}


@contextmanager
def patient(launcher: object) -> Iterator[list[Exception]]:
    """Gives a list that fills with what the jobs of `launcher` raise."""
    errors: list[Exception] = []
    package = ".".join(type(launcher).__module__.split(".")[:2])
    if package not in RESULTS:
        yield errors
        return
    place, name, nothing = RESULTS[package]
    module, _, attribute = place.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, attribute) if attribute else owner
    ask = getattr(owner, name)

    def result(*args: Any, **kwargs: Any) -> Any:
        try:
            return ask(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            return nothing

    setattr(owner, name, result)
    try:
        yield errors
    finally:
        setattr(owner, name, ask)
