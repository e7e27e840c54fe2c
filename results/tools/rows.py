"""Read the runs of a study, and recompute the numbers of its table.json.

A study is a folder with rows.csv, table.json and perhaps documents.csv, or two files: STUDY.csv has the rows, and
STUDY.json the baseline, the metrics and the margin of a table.json.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simbal.metrics.definitions import NUMBERS
from simbal.report.comparison import Row, baseline_arms, compare_pairs
from simbal.report.statistics import ROUNDING, interval, summarize
from simbal.runs.curves import DocumentSums

LABELS = ["arm", "balancing", "setting", "seed", "run"]  # the columns before the numbers
SHARE, NEVER = "tokens_to_loss", "never"
NOT_IN_ROWS = {"label", "config_hash", "paper", "by_slope", "validations"}  # keys of table.json
METRICS = {metric.key: metric for metric in NUMBERS}


@dataclass(frozen=True)
class StudyRun:
    """One finished run, in the form that `simbal.report.comparison` reads."""

    record: str  # name of its folder
    seed: int
    numbers: dict[str, float]
    documents: DocumentSums | None

    @property
    def spec(self) -> SimpleNamespace:
        """The hash that identifies copies of a run."""
        return SimpleNamespace(hash=self.record)


@dataclass(frozen=True)
class StudyArm:
    """The runs of one arm."""

    name: str
    balancing: str
    setting: str
    runs: tuple[StudyRun, ...]
    untrained: str = ""  # see `simbal.report.arms.Arm`

    def values(self, key: str) -> dict[int, float]:
        """Return a number by seed, for the runs that have it."""
        return {run.seed: run.numbers[key] for run in self.runs if key in run.numbers}


def read_rows(study: Path) -> dict[str, StudyArm]:
    """Return the arms of a study by name, in the order of the table."""
    arms, documents = dict[str, StudyArm](), _read_documents(study / "documents.csv")
    for row in read_csv(study / "rows.csv" if study.is_dir() else study.with_suffix(".csv")):
        name, balancing, setting, seed, run = (row.pop(label) for label in LABELS)
        numbers = {key: math.inf if value == NEVER else float(value) for key, value in row.items() if value}
        before = arms[name].runs if name in arms else ()
        added = StudyRun(run, int(seed), numbers, documents.get(run))
        arms[name] = StudyArm(name, balancing, setting, (*before, added))
    return arms


def read_csv(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file, if it exists."""
    yield from csv.DictReader(file.read_text(encoding="utf-8").splitlines() if file.exists() else [], strict=True)


def read_table(study: Path) -> dict[str, Any]:
    """Return the content of table.json, or of STUDY.json."""
    file = study / "table.json" if study.is_dir() else study.with_suffix(".json")
    return json.loads(file.read_text(encoding="utf-8"))


def recompute(arms: dict[str, StudyArm], table: dict[str, Any]) -> dict[str, Row]:
    """Return the comparison of the arms, with the baseline and metrics of table.json."""
    metrics, others = [METRICS[key] for key in table["metrics"]], baseline_arms([*arms.values()], table["baseline"])
    pairs = [(arm, found[0]) for arm, found in zip(arms.values(), others, strict=True) if found not in ([], [arm])]
    compared = compare_pairs(pairs, metrics, table["equivalence_margin"])
    differences = {arm.name: found for (arm, _), found in zip(pairs, compared, strict=True)}
    other_of = {arm.name: other for arm, other in pairs}
    return {
        name: Row(
            arm, {key: summarize([*arm.values(key).values()]) for key in table["metrics"]}, other_of.get(name),
            differences.get(name, {}),
        )
        for name, arm in arms.items()
    }  # fmt: skip


def check_json(rows: dict[str, Row], table: dict[str, Any]) -> list[str]:
    """Return a message for each number of table.json that does not follow from the rows."""
    measured = any(run.documents for row in rows.values() for run in row.arm.runs)
    skipped = NOT_IN_ROWS if measured else {*NOT_IN_ROWS, "over_documents"}
    computed = [
        {
            "runs": [
                {"folder": run.record, "seed": run.seed, "values": {key: run.numbers.get(key) for key in row.summaries}}
                for run in row.arm.runs
            ],
            "summaries": {key: asdict(summary) if summary else None for key, summary in row.summaries.items()},
            "differences": {key: difference.numbers() for key, difference in row.differences.items()},
            "tokens_to_loss": _tokens_to_loss(row.arm.values(SHARE)),
        }
        for row in rows.values()
    ]
    return _unlike(table["arms"], computed, "arms", skipped)


def _tokens_to_loss(shares: dict[int, float]) -> dict[str, Any] | None:
    """Return the tokens to the baseline's final loss as fractions of the baseline's tokens, and the saving."""
    if not shares:
        return None
    saving, low, high = None, None, None
    if all(map(math.isfinite, shares.values())) and (saved := summarize([1 - share for share in shares.values()])):
        saving = saved.mean
        low, high = interval(saved) if saved.sd is not None and saved.sd > ROUNDING else (None, None)
    reached = {str(seed): share if math.isfinite(share) else None for seed, share in shares.items()}
    return {"shares": reached, "saving": saving, "low": low, "high": high}


def _read_documents(file: Path) -> dict[str, DocumentSums]:
    found: dict[str, tuple[list[float], list[int]]] = {}
    for row in read_csv(file):
        nats, tokens = found.setdefault(row["run"], ([], []))
        nats.append(float(row["nats"]))
        tokens.append(int(row["tokens"]))
    return {run: DocumentSums(*sums) for run, sums in found.items()}


def _unlike(printed: Any, computed: Any, where: str, skipped: set[str]) -> list[str]:
    """Return a message for each value of table.json that differs from the recomputed value."""
    if isinstance(printed, dict) and isinstance(computed, dict):
        keys = [key for key in {**printed, **computed} if key not in skipped]
        pairs = [(key, printed.get(key, "absent"), computed.get(key, "absent")) for key in keys]
    elif isinstance(printed, list) and isinstance(computed, list) and len(printed) == len(computed):
        pairs = [(str(place), *pair) for place, pair in enumerate(zip(printed, computed, strict=True))]
    else:
        numbers = isinstance(printed, float | int) and isinstance(computed, float | int)
        if where.endswith("folder"):
            printed = printed.rpartition("/")[2]
        close = numbers and " values " not in where and math.isclose(printed, computed, rel_tol=1e-6, abs_tol=1e-12)
        same = close or printed == computed
        return [] if same else [f"{where}: table.json has {printed}, rows.csv gives {computed}"]
    return [line for key, *pair in pairs for line in _unlike(*pair, f"{where} {key}", skipped)]
