"""Runs the analyses of a config: each is printed, and written where it can be read again."""

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_method

from simbal.analysis.finding import Finding
from simbal.console import console
from simbal.errors import UserError
from simbal.run_folder import refusals_of_disk, write_json


def evaluate(analyses: dict[str, dict[str, Any]], output_dir: str) -> None:
    """Run each analysis: its `_target_`, called with its other keys.

    Args:
        analyses: by name, the keys of each.
        output_dir: results go to <output_dir>/analysis/<name>.json.

    Raises:
        UserError: an analysis refuses its keys, or the disk refuses the result.
    """
    if not isinstance(output_dir, str):
        raise UserError(f"output_dir={output_dir} must be the path of a folder")
    out = console()
    for name, settings in analyses.items():
        started = time.perf_counter()
        arguments = {key: value for key, value in settings.items() if key != "_target_"}
        finding: Finding = get_method(settings["_target_"])(**arguments)
        seconds = time.perf_counter() - started
        finding.show(out)
        file = Path(output_dir, "analysis", f"{name}.json")
        with refusals_of_disk(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"analysis": name, "settings": settings, **finding.record, **_circumstances(seconds)})
        out.print(f"written: {file}", soft_wrap=True)


def _circumstances(seconds: float) -> dict[str, Any]:
    """What a number can depend on beside its settings: the order of a sum depends on the number of threads."""
    return {
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("simbal", "torch")},
    }
