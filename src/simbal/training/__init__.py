"""Training, from a config to a finished run folder."""

import gc
import importlib.metadata
import importlib.util
import logging
import sys
from typing import Any


def _import_two_metrics() -> None:
    """Import the two classes of torchmetrics that Lightning wants, and the rest of it when somebody asks for more.

    Its `__init__` imports a hundred metrics, and with them scipy.signal and transformers: two fifths of the time in
    which a program starts.
    """
    if "torchmetrics" in sys.modules:
        return
    spec = importlib.util.find_spec("torchmetrics")
    assert spec, "Lightning requires it"
    assert spec.loader
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def import_all(name: str) -> Any:
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, name)

    package.__version__ = importlib.metadata.version("torchmetrics")  # type: ignore[attr-defined]  # Lightning asks
    package._logger = logging.getLogger("torchmetrics")  # type: ignore[attr-defined]  # its own modules ask
    package.__getattr__ = import_all  # type: ignore[method-assign]
    sys.modules["torchmetrics"] = package
    importlib.import_module("torchmetrics.utilities")  # before what it imports, in a circle
    package.Metric = importlib.import_module("torchmetrics.metric").Metric  # type: ignore[attr-defined]
    package.MetricCollection = importlib.import_module("torchmetrics.collections").MetricCollection  # type: ignore[attr-defined]


# What Lightning and torch make while they are imported stays: looking for garbage among it would cost two thirds of
# that time again, half of it at the end of the process; and a fork that looks would copy every page of its server.
enabled = gc.isenabled()
gc.disable()
_import_two_metrics()
import lightning  # noqa: E402, F401

gc.freeze()
if enabled:
    gc.enable()
