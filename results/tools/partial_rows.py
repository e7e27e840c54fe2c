"""Append the finished runs of a study to its partial.csv, with commit and processor.

Run it in the clone that trained the runs, with the interpreter of that clone:

    .venv/bin/python PROJECT/results/tools/partial_rows.py outputs/bench_repair PROJECT/results/bench_repair/partial.csv
"""

import csv
import io
import json
import sys
from pathlib import Path

import torch
from simbal.report.reproduce.rows import rows_csv

from simbal.report.report import read_table


def processor() -> str:
    """Return the name of the processor and its vector instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    family = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{fields.get('model name')} {family} {torch.backends.cpu.get_cpu_capability()}"


def main(runs: Path, target: Path) -> None:
    """Append each run that the file does not have yet. One file collects the runs of several machines."""
    rows = [*csv.DictReader(io.StringIO(rows_csv(read_table(runs).rows)))]
    kept = [*csv.DictReader(target.open())] if target.exists() else []
    known = {row["run"] for row in kept}
    for row in rows:
        if row["run"] not in known:
            code = json.loads((runs / row["run"] / "record.json").read_text())["code"]
            kept.append(row | {"commit": code["commit"], "cpu": processor()})
    columns = list(dict.fromkeys(key for row in kept for key in row))
    with target.open("w", newline="") as file:
        lines = csv.DictWriter(file, columns, lineterminator="\n")
        lines.writeheader()
        lines.writerows(kept)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
