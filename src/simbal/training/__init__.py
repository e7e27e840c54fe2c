"""Training: from a config to a finished run folder. Importing this package imports Lightning."""

import gc
import importlib.metadata
import importlib.util
import logging
import sys
from typing import Any


def import_torchmetrics_lazily() -> None:
    """Import only the two classes of torchmetrics that Lightning needs; any other attribute imports the full package.

    The full package takes 40% of the startup time: it imports a hundred metrics, scipy.signal and transformers.
    """
    if "torchmetrics" in sys.modules:
        return
    spec = importlib.util.find_spec("torchmetrics")
    assert spec and spec.loader, "Lightning requires it"  # noqa: PT018
    loader, package = spec.loader, importlib.util.module_from_spec(spec)
    lazy: Any = package

    def import_full_package(name: str) -> Any:
        del lazy.__getattr__
        loader.exec_module(package)
        return getattr(package, name)

    lazy.__getattr__ = import_full_package
    lazy.__version__ = importlib.metadata.version("torchmetrics")  # read by Lightning
    lazy._logger = logging.getLogger("torchmetrics")  # read by the package's own modules
    sys.modules["torchmetrics"] = package
    importlib.import_module("torchmetrics.utilities")  # first, because of a circular import
    lazy.Metric = importlib.import_module("torchmetrics.metric").Metric
    lazy.MetricCollection = importlib.import_module("torchmetrics.collections").MetricCollection


# Imported objects live until the process ends. Without garbage collection the import takes 40% less time, and frozen
# objects are never touched again, so that forked jobs share their memory pages with the server.
gc_was_enabled = gc.isenabled()
gc.disable()
import_torchmetrics_lazily()
import lightning  # noqa: E402, F401

gc.freeze()
if gc_was_enabled:
    gc.enable()
