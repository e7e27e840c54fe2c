"""For PYTHONPATH: every process pretends to train (see tests/sweep/pretend.py), without importing torch."""

import runpy
import sys
import types
from pathlib import Path

for name, functions in runpy.run_path(str(Path(__file__).parents[1] / "pretend.py"))["REPLACED"].items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(functions)
