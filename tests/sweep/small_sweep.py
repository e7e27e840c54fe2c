"""A sweep of four short runs, and its results, which no interruption may change."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.conftest import CONF, MARKOV, SMALL

RUNS = (
    "balancing=lf_simbal,lbl", "seed=0-1", "trainer.max_steps=60", "trainer.ckpt_every=7", "trainer.val_every=10",
    "trainer.log_every=1", "trainer.pes_every=9",
)  # fmt: skip


def command(folder: Path, cache_dir: Path, *more: str) -> list[str]:
    """Return the command; an override in `more` replaces the override of the same key."""
    places = (f"output_dir={folder}", f"data.cache_dir={cache_dir}")
    values = dict(override.split("=", 1) for override in (*SMALL, *MARKOV, *RUNS, *places, *more))
    return [sys.executable, str(CONF.parent / "train.py"), "-m", *(f"{key}={value}" for key, value in values.items())]


def results(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the table without speeds, and all rows of all runs."""
    table = json.loads((folder / "default" / "table.json").read_text())
    for arm in table["arms"]:
        for run in arm["runs"]:
            run.pop("folder")
            run["values"].pop("tokens_per_second")
        arm["summaries"].pop("tokens_per_second")
    files = sorted((folder / "default").glob("*/metrics.jsonl"))
    return table["arms"], {file.parent.name: curve(file) for file in files}


def curve(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl without speeds."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]
