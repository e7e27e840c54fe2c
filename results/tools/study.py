"""Run or resume a study, and write its numbers and figures: python -m results.tools.study results/collapse."""

import csv
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from results.tools.figures import COLUMNS, draw
from results.tools.rows import LABELS, NEVER, SHARE
from results.tools.verify import write_sums
from simbal.report import curves
from simbal.report.collect import collect
from simbal.report.curves import MOST_ARMS
from simbal.report.table import Table, build


def overrides(study: Path) -> list[str]:
    """Return the arguments of `train.py -m`: its sweep.yaml as overrides, or the command of origin.json."""
    if not study.is_dir():
        sys.exit(f"there is no study {study}")
    if not (study / "sweep.yaml").exists():
        if not (study / "origin.json").exists():
            sys.exit(f"{study} has no sweep.yaml or origin.json: the commands of its sweeps are in its plan.md")
        command = json.loads((study / "origin.json").read_text(encoding="utf-8"))["command"]
        words = [word for word in shlex.split(command)[3:] if not word.startswith(("name=", "output_dir="))]
        return [*words, f"name={study.name}"]
    content = yaml.safe_load((study / "sweep.yaml").read_text(encoding="utf-8"))
    arms, found = content["hydra"]["sweeper"].pop("arms", []), list[str]()
    for override in _flatten(content):
        key = f" {override.partition('=')[0]}="
        if any(key in arm for arm in arms):  # a key on the command line would override the key of the arm
            arms = [arm if key in arm else f"{arm} {override}" for arm in arms]
        else:
            found.append(override)
    return [*found, f"hydra.sweeper.arms={json.dumps(arms)}"] if arms else found


def run(study: Path, more: list[str]) -> None:
    """Train the missing runs, then write the study's tables, CSV files, origin.json and figures."""
    arguments = ["train.py", "-m", *overrides(study), *more]
    print(f"python {shlex.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, *arguments], check=False).returncode
    if code or "dry_run=true" in more:
        sys.exit(code)
    outputs = Path("outputs", study.name)
    for name in ("table.md", "table.json"):
        shutil.copy(outputs / name, study)
    table = build(study.name, collect(outputs))
    write(table, study)
    write_origin([run.result for row in table.rows for run in row.arm.runs], f"python {shlex.join(arguments)}", study)
    draw(study)
    write_sums(study.parent)


def write_origin(records: list[dict[str, Any]], command: str, study: Path) -> None:
    """Write origin.json: the command, the commits of the runs, and their dates."""
    codes = [json.loads(text) for text in dict.fromkeys(json.dumps(record["code"]) for record in records)]
    times = {"first_started": min(r["started"] for r in records), "last_ended": max(r["ended"] for r in records)}
    origin = {"command": command, "finished": len(records), "code": codes, **times}
    (study / "origin.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def write(table: Table, study: Path) -> None:
    """Write rows.csv, documents.csv and curves.csv."""
    runs = [run for row in table.rows for run in row.arm.runs]
    documents = [["run", "document", "tokens", "nats"]]
    for run in runs:
        if run.documents:
            pairs = enumerate(zip(run.documents.tokens, run.documents.nats, strict=True))
            documents += [[run.path.name, place, tokens, nats] for place, (tokens, nats) in pairs]
    arms = curves.read_arms([row.arm for row in table.best_arms(MOST_ARMS).rows], table.baseline)
    shown = {
        "loss": curves.metric_curves(arms, "val/loss"),
        "experts": curves.metric_curves(arms, "val/unique_experts"),
        "max-vio": curves.metric_curves(arms, "val/max_vio"),
        "pes": curves.metric_curves(arms, "val/min_pes"),
        "pes-rate": curves.rate_curves(arms, "val/min_pes"),
    }
    points = [
        [name, curve.arm, curve.style, x, mean, band, curve.rival]
        for name, found in shown.items()
        for curve in found
        for x, mean, band in zip(curve.xs, curve.means, curve.bands or [""] * len(curve.xs), strict=True)
    ]
    points.insert(0, COLUMNS)
    for name, lines in (("rows", rows_of(table)), ("documents", documents), ("curves", points)):
        with (study / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


def rows_of(table: Table) -> list[list[Any]]:
    """Return the labels and numbers of each run, below a line of column names."""
    runs = [(row, run) for row in table.rows for run in row.arm.runs]
    keys = [*dict.fromkeys(key for _, run in runs for key in [*run.result["metrics"], *run.analyzed])]
    rows: list[list[Any]] = [[*LABELS, *keys, SHARE]]
    for row, run in runs:
        share = row.tokens_to_loss.shares.get(run.seed, "") if row.tokens_to_loss else ""
        setting = " ".join(f"{key}={cell.text}" for key, cell in row.arm.label.items() if key != "balancing")
        labels = [row.arm.name, row.arm.balancing, setting, run.seed, run.path.name]
        rows.append([*labels, *(run.value(key) for key in keys), NEVER if share is None else share])
    return rows


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a sweep file as overrides."""
    for key, value in content.items():
        if key == "defaults":
            groups = (pair for default in value for pair in default.items())
            yield from (f"{group.removeprefix('override /')}={option}" for group, option in groups)
        elif isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.".removesuffix("hydra.sweeper.params."))
        else:
            quoted = isinstance(value, list) or " " in str(value)
            yield f"{prefix}{key}={json.dumps(value) if quoted else value}"


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
