"""Append finished runs to partial.csv and partial_curves.csv of an unfinished study, with commit and processor.

Run it on the machine that trained the runs: python -m results.tools.partial outputs/short_1k results/bench_regime
"""

import csv
import sys
from pathlib import Path
from typing import Any

import torch

from results.tools.rows import LABELS, read_csv
from results.tools.study import rows_of
from simbal.report.collect import collect
from simbal.report.table import build
from simbal.runs import curves

CURVE = "val/loss"


def processor() -> str:
    """Return the name of the processor and its vector instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    family = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{fields.get('model name')} {family} {torch.backends.cpu.get_cpu_capability()}"


def main(sweep: Path, study: Path) -> None:
    """Append each run of a sweep that the files do not have yet."""
    table = build(sweep.name, collect(sweep))
    runs = {run.path.name: run for row in table.rows for run in row.arm.runs}
    kept, points = [*read_csv(study / "partial.csv")], [*read_csv(study / "partial_curves.csv")]
    known = {row["run"] for row in kept}
    columns, *rows = rows_of(table)
    for row in (dict(zip(columns, cells, strict=True)) for cells in rows):
        if (name := row["run"]) not in known:
            result = runs[name].result
            extra = {"tokens": result["tokens"], "seconds": round(result["seconds"], 1)}
            extra |= {"commit": result["code"]["commit"], "cpu": processor()}
            kept.append({"sweep": sweep.name, **row, **extra})
            curve = curves.curve(runs[name].path, CURVE)
            points += [{"run": name, "tokens": tokens, CURVE: loss} for tokens, loss in curve]
    _write(study / "partial.csv", ["sweep", *LABELS], kept)
    _write(study / "partial_curves.csv", [], points)


def _write(file: Path, first: list[str], rows: list[dict[str, Any]]) -> None:
    columns = [*dict.fromkeys([*first, *(key for row in rows for key in row)])]
    with file.open("w", encoding="utf-8", newline="") as opened:
        lines = csv.DictWriter(opened, columns, lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
