"""Make the tables of a study with runs of several machines: python -m results.tools.combine results/bench_repair

rows.csv, table.json, table.md and the figure of differences follow from partial.csv, and the baseline and columns from
sweep.yaml, or from table.yaml for a study of several sweeps. A baseline that is a balancing compares the arms of each
sweep and setting. `treatments` in table.yaml are keys that belong to the balancing, not to the setting, with the value
of the baseline. `sweeps` in table.yaml are the sweeps of the tables; the others go to others.csv and others.json.
"""

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from results.tools.figures import redraw
from results.tools.rows import METRICS, SHARE, StudyArm, read_csv, read_rows, read_table, recompute
from results.tools.verify import rewrite, write_sums
from simbal.metrics.definitions import short_name
from simbal.report.statistics import summarize

# columns of partial.csv that rows.csv does not have
NO_NUMBERS = ("sweep", "tokens", "seconds", "commit", "cpu", SHARE)
MARGIN = 0.026


def combine(study: Path) -> None:
    """Write rows.csv, table.json, table.md, curves.csv and differences.svg."""
    settings = next(file for name in ("sweep", "table") if (file := study / f"{name}.yaml").exists())
    shown = yaml.safe_load(settings.read_text(encoding="utf-8"))
    treatments = {key: str(value) for key, value in shown.get("treatments", {}).items()}
    rows, others = list[dict[str, str]](), list[dict[str, str]]()
    for row in read_csv(study / "partial.csv"):
        if "sweeps" in shown and row["sweep"] not in shown["sweeps"]:
            others.append(row)
        else:
            rows.append(_with_treatments(row, treatments))
    _write_rows(study / "rows.csv", rows)
    metrics = {key: metric.title for key, metric in METRICS.items() if short_name(key) in shown["columns"]}
    arms = [*read_rows(study).values()]
    keys = [*dict.fromkeys(key for arm in arms for key in _label(arm))]
    table = {"name": study.name, "baseline": shown["baseline"], "equivalence_margin": MARGIN, "metrics": metrics}
    if others:
        _write_rows(study / "others.csv", others)
        (study / "others.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    table |= {"arms": [_arm_json(arm, keys, metrics) for arm in arms], "notes": []}
    (study / "table.json").write_text(json.dumps(table), encoding="utf-8")
    rewrite(study)
    if points := [*_differences(study)]:
        redraw(study, "differences", points)
    write_sums(study.parent)


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the rows by mean loss of their arm. Arms of several sweeps have the sweep in their name and setting."""
    if len({row.get("sweep") for row in rows}) > 1:
        for row in rows:
            row["arm"] += f" sweep={row['sweep']}"
            row["setting"] = f"{row['setting']} sweep={row['sweep']}".strip()
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["arm"], []).append(float(row["val/loss"]))
    rows = sorted(rows, key=lambda row: (fmean(losses[row["arm"]]), int(row["seed"])))
    with path.open("w", encoding="utf-8", newline="") as file:
        columns = [key for key in rows[0] if key not in NO_NUMBERS]
        lines = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)


def _with_treatments(row: dict[str, str], treatments: dict[str, str]) -> dict[str, str]:
    """Return the row with these keys moved from the setting to the balancing; values of the baseline are left out."""
    balancing, setting = [row["balancing"]], list[str]()
    for word in row["setting"].split():
        key, _, value = word.partition("=")
        if key not in treatments:
            setting.append(word)
        elif value != treatments[key]:
            balancing.append(f"{short_name(key)}={value}")
    left_out = {f"{short_name(key)}={value}" for key, value in treatments.items()}
    name = " ".join(word for word in row["arm"].split() if word not in left_out)
    return row | {"arm": name, "balancing": " ".join(balancing), "setting": " ".join(setting)}


def _differences(study: Path) -> Iterator[list[Any]]:
    """Yield the differences in loss that have an interval, as points of a figure."""
    for name, row in recompute(read_rows(study), read_table(study)).items():
        found, loss = row.differences.get("val/loss"), row.summaries["val/loss"]
        if row.other and loss and found and found.low is not None:
            yield [name, 0, loss.mean, found.mean, found.mean - found.low, row.other.name]


def _label(arm: StudyArm) -> dict[str, str]:
    """Return the value of each key in the name of an arm."""
    return dict(part.split("=") if "=" in part else ("balancing", part) for part in arm.name.split())


def _arm_json(arm: StudyArm, keys: list[str], metrics: dict[str, str]) -> dict[str, Any]:
    """Return an arm of table.json, labeled with `keys`, without its differences, which `rewrite` computes."""
    label = _label(arm)
    summaries = {key: summarize([*arm.values(key).values()]) for key in metrics}
    return {
        "label": {key: label.get(key, "") for key in keys},
        "runs": [
            {"folder": run.record, "seed": run.seed, "values": {key: run.numbers.get(key) for key in metrics}}
            for run in arm.runs
        ],
        "summaries": {key: summary and asdict(summary) for key, summary in summaries.items()},
        "tokens_to_loss": None,
        "paper": {},
    }


if __name__ == "__main__":
    combine(Path(sys.argv[1]))
