"""Sweep folders with curves and analyses, without training."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simbal.analysis.result import write_analysis

HOSTILE = (
    "<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "</style><script>alert(1)</script>", "<!-- ",
    "&lt;script&gt;", "{{ 7*7 }}", "'; alert(1); '", "</title><base href=//x>", "<a href='javascript:x'>", "\\", "漢",
)  # fmt: skip
STEPS = range(0, 50, 10)
DROPPING = {"settings": {}, "definition": {}, "metrics": {"ppl_drop_0": 1.0}}
PRUNING = {"settings": {}, "definition": {}, "metrics": {"ppl_prune_0": 1.0}}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "fake"


@pytest.fixture
def write_run(write_run: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a run of 2 layers and 4 experts, with its curves, to tmp_path/outputs/fake and returns its path."""

    def write(balancing: str = "simbal", seed: int = 0, dense: bool = False, **fields: Any) -> Path:
        metrics = {"val/loss": 4.0 + seed, "val/ppl": 50.0 + seed, "val/max_vio": None if dense else 0.5}
        layers = {} if dense else {"val/tokens_per_expert": [[10, 20, 30, 40 + seed], [0, 0, 50, 50]]}
        path = write_run(balancing, seed, **{"metrics": metrics, "layers": layers, "steps": 40, "tokens": 400} | fields)
        write_rows(path, [row(step, seed, dense) for step in STEPS])
        return path

    return write


@pytest.fixture
def analyze() -> Callable[[Path], None]:
    """Writes the results of the analyses dropping and pruning."""

    def write(run: Path) -> None:
        curve = [{"drop": drop, "ppl": 50.0 + 10 * drop} for drop in range(3)]
        arms = {name: {"threshold": at, "ppl": 50.0} for name, at in (("plain", None), ("0", 0), ("0.1", 0.1))}
        write_analysis(run / "analysis/dropping.json", DROPPING | {"curve": curve})
        write_analysis(run / "analysis/pruning.json", PRUNING | {"arms": arms})

    return write


def row(step: int, seed: int, dense: bool) -> dict[str, Any]:
    place = {"step": step, "tokens": 10 * step, "val/loss": 8 - step / 10 + seed, "train/ce": 9 - step / 10 + seed}
    if dense:
        return place
    load = {"val/unique_experts": 8 - step // 20, "val/max_vio": 0.5 + seed}
    layers = {"val/pes": [0.1 + seed, 0.3], "val/tokens_per_expert": [[25 + step, 25, 25, 25], [50, 50, 0, 0]]}
    return place | load | {"val/min_pes": 0.1, "val/mean_pes": step / 1000, "layers": layers}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_hostile(write_run, sweep: Path, words: str) -> None:
    """Two arms and failed, diverged and damaged runs, with `words` wherever a file can have text."""
    shutil.rmtree(sweep, ignore_errors=True)
    texts = {"definitions": {"val/ppl": words}, "warnings": [words]}
    for seed in (0, 1):
        write_run("lbl", seed, **texts)
        for note in (words, "none"):  # two arms of one strategy, which have the note in their names
            write_run("simbal", seed, **texts, keys={"balancing.simbal.note": note, "data.cache_dir": words})
    write_run("none", 2, status="diverged", error=words, step=3, warnings=[words])
    write_run("none", 3, status="failed", error=words)
    damaged = write_run("none", 4)
    (damaged / "record.json").write_text(json.dumps({"status": words, "config_hash": "a"}))
    (sweep / "sweep.json").write_text(json.dumps({"command": words, "runs": {words: words}}))
