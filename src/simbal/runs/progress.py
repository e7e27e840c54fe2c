"""Reads progress.json, which says where a running job is, and how long it has to go."""

from pathlib import Path
from typing import Any

import orjson

from simbal.runs.record import is_number

PROGRESS_FILE = "progress.json"
STEPS = ("step", "max_steps")
NUMBERS = (*STEPS, "loss", "tokens_per_second", "seconds_left")


def read_progress(run_path: Path) -> dict[str, Any]:
    """Return what a run's progress.json says; empty before there is one, and for one that makes no sense."""
    try:
        said = orjson.loads((run_path / PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return said if _is_progress(said) else {}


def _is_progress(said: Any) -> bool:
    """Whether `said` can be shown and computed with.

    Each number that is there is one, and a step comes with the number of steps.
    """
    if not isinstance(said, dict) or not all(said.get(key) is None or is_number(said[key]) for key in NUMBERS):
        return False
    steps = [said[key] for key in STEPS if key in said]
    return not steps or (len(steps) == 2 and None not in steps and 0 <= steps[0] <= steps[1] != 0)
