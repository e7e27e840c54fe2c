"""The numbers of every run of a study: rows.csv, from which all that its table prints can be computed again."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simbal.errors import UserError
from simbal.report.arms import Arm
from simbal.report.collect import Run
from simbal.report.columns import ABSENT
from simbal.report.comparison import Row

ROWS = "rows.csv"
LARGEST = 1 << 24  # bytes of a JSON file of a study
SHARE, NEVER = "tokens_to_loss", "never"
PER_PARAMETER = "tokens_per_expert_parameter"
LABELS = ["arm", "balancing", "setting", "seed", "run"]  # the columns before those of numbers


@dataclass(frozen=True)
class ArmRows:
    """The runs of an arm."""

    name: str
    balancing: str
    setting: str  # the other columns of its label: arms that share it differ in balancing alone
    by_seed: dict[int, dict[str, float]]  # numbers by key

    def values(self, key: str) -> dict[int, float]:
        """Return a number by seed, for the runs that have it."""
        return {seed: numbers[key] for seed, numbers in self.by_seed.items() if key in numbers}


def rows_csv(rows: Sequence[Row]) -> str:
    """Return rows.csv: for each finished run its arm, seed and folder, and every number of its record and analyses.

    `PER_PARAMETER` has the tokens that an evenly used expert has seen for each of its parameters. The last column,
    `SHARE`, has its tokens up to the baseline's final loss by the baseline's, which follow from both their curves:
    `NEVER` where that loss is not reached, nothing where there is no baseline.
    """
    keys = list(dict.fromkeys(key for row in rows for run in row.arm.runs for key in _keys(run)))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([*LABELS, *keys, PER_PARAMETER, SHARE])
    for row in rows:
        arm, shares = row.arm, row.tokens_to_loss.shares if row.tokens_to_loss else {}
        for run in arm.runs:
            labels = [arm.name, arm.balancing, setting_of(arm), run.seed, run.path.name]
            share = NEVER if shares.get(run.seed, 0) is None else shares.get(run.seed)
            lines.writerow([*labels, *(run.value(key) for key in keys), tokens_per_expert_parameter(run), share])
    return text.getvalue()


def tokens_per_expert_parameter(run: Run) -> float | None:
    """Return T K / (E 3 D F) of a finished run: T tokens, of which each expert sees K / E if all are used evenly.

    Shapes: E experts of three matrices, K of them for each token, D model width, F expert hidden width. None: dense.
    """
    model = run.spec.config.model
    size = model.num_experts * 3 * model.d_model * model.d_expert
    return run.result["tokens"] * model.top_k / size if size else None


def setting_of(arm: Arm) -> str:
    """Return what an arm's label says beside its balancing, such as `router=sigmoid`."""
    shown = {column: cell.text for column, cell in arm.label.items() if cell.text != ABSENT}
    return " ".join(f"{column}={text}" for column, text in shown.items() if not column.startswith("balancing"))


def read_rows(folder: Path) -> list[ArmRows] | None:
    """Return the arms of rows.csv in the order of the table; None if there is no such file.

    Raises:
        UserError: the file holds something else.
    """
    file = folder / ROWS
    if not file.exists():
        return None
    found: dict[str, ArmRows] = {}
    try:
        with file.open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text, strict=True):
                name, balancing, setting, seed, _ = (row.pop(label) for label in LABELS)
                arm = found.setdefault(name, ArmRows(name, balancing, setting, {}))
                arm.by_seed[int(seed)] = {
                    key: math.inf if value == NEVER else float(value) for key, value in row.items() if value
                }
    except (OSError, csv.Error, KeyError, TypeError, ValueError):
        raise UserError(f"{file} does not hold the numbers of a study's runs") from None
    return [*found.values()]


def baseline_of(folder: Path) -> str | None:
    """Return the arm or the balancing that a study's table compares with, which need not be what its runs name.

    Raises:
        UserError: table.json is not there or broken.
    """
    with of_a_study(folder):
        baseline: str | None = json.loads((folder / "table.json").read_bytes())["baseline"]
    return baseline


def columns_of(folder: Path) -> list[str]:
    """Return the columns of the labels in a study's table, which its failed runs have decided too.

    Raises:
        UserError: table.json is not there or broken.
    """
    with of_a_study(folder):
        arms = json.loads((folder / "table.json").read_bytes())["arms"]
        return [*dict.fromkeys(column for arm in arms for column in arm["label"])]


@contextmanager
def of_a_study(folder: Path) -> Iterator[None]:
    """Raise `UserError` where a study's table is found broken within the block."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / 'table.md'} or table.json is not that of a study") from None


def rival(arm: ArmRows, arms: Sequence[ArmRows], baseline: str) -> ArmRows | None:
    """Return the arm to compare with, by the name or the balancing of the table's baseline."""
    named = [other for other in arms if other.name == baseline]
    same = [other for other in arms if other.balancing == baseline and other.setting == arm.setting]
    found = named or same
    return found[0] if len(found) == 1 and found[0] is not arm else None


def _keys(run: Run) -> list[str]:
    numbers = {**run.result["metrics"], "tokens_per_second": None, **run.analysed}
    return [key for key in numbers if run.value(key) is not None]
