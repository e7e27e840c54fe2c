"""The table of a folder's runs, a pure function of them: a row for each arm, and how far it is from the baseline's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import orjson

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.arms import group, label_columns, label_of, short_label
from simbal.report.collect import Run
from simbal.report.columns import usual
from simbal.report.comparison import Row, compare, conclude, every_pair
from simbal.report.models import MeasuredModel, usual_of_models


@dataclass(frozen=True, eq=False)  # a table is itself alone, so that what follows from it can be kept
class Table:
    """Everything that a rendering of the table shows."""

    name: str
    columns: list[str]  # the label columns
    metrics: Sequence[Metric]  # the columns of numbers
    rows: list[Row]
    baseline: str | None
    absent: list[tuple[str, Run]]  # failed, diverged, killed, pruned, damaged and unfinished runs, each with its label
    paper: bool = False  # whether the paper's numbers were asked for
    missing: dict[str, str] = field(default_factory=dict)  # label by folder name of the runs that were never started
    margin: float | None = None  # nats per token, of equivalence; None: the runs name several
    pairs: list[Row] = field(default_factory=list)  # of two arms each, if they were asked for; then `rows` compare none
    pairs_of: str = "every two arms"  # what the pairs are
    models: Sequence[MeasuredModel] = ()  # of Hugging Face, that were measured into the same folder

    @property
    def compared(self) -> list[Row]:
        """The rows that have differences."""
        return [row for row in self.pairs or self.rows if row.differences]

    def of_best(self, most: int) -> "Table":
        """Return the table of at most so many arms, for who cannot show very many: the lowest validation losses.

        What an arm is compared with comes with it, and all arms of the baseline do if they are few.
        """
        if len(self.rows) <= most:
            return self
        baseline = [row.arm.name for row in self.rows if row.arm.answers_to(self.baseline)]
        chosen = dict.fromkeys(baseline if len(baseline) <= most // 2 else [])
        for row in sorted(self.rows, key=_loss):
            more = dict.fromkeys([row.arm.name, *([row.other.name] if row.other else [])])
            if len(chosen | more) <= most:
                chosen |= more
        rows = [row for row in self.rows if row.arm.name in chosen]
        pairs = [row for row in self.pairs if row.other and {row.arm.name, row.other.name} <= chosen.keys()]
        return replace(self, rows=rows, pairs=pairs)


@dataclass(frozen=True)
class LastSweep:
    """The sweep that was last run in a folder, as sweep.json says; empty if there was none."""

    command: str = ""
    runs: dict[str, str] = field(default_factory=dict)  # label by folder name

    @classmethod
    def of(cls, folder: Path) -> "LastSweep":
        """Read a folder's sweep.json; `UserError` if it is broken."""
        file = folder / "sweep.json"
        if not file.exists():
            return cls()
        try:
            said = orjson.loads(file.read_bytes())
            if all(isinstance(text, str) for text in (said["command"], *said["runs"].values())):
                return cls(said["command"], said["runs"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        raise UserError(f"{file} is broken: delete it; the runs in {folder} need it no more")

    def never_started(self, started: Collection[str]) -> dict[str, str]:
        """Return labels by folder name of the sweep's runs that are not in `started`."""
        return {name: label for name, label in self.runs.items() if name not in started}


def build(
    name: str,
    runs: Sequence[Run],
    baseline: str | None = None,
    metrics: Sequence[Metric] | None = None,
    paper: bool = False,
    missing: Mapping[str, str] | None = None,
    margin: float | None = None,
    pairs: bool = False,
    models: Sequence[MeasuredModel] = (),
) -> Table:
    """Build the table, which compares arms with the one whose balancing is `baseline` and whose other keys are equal.

    Args:
        name: what stands above it.
        runs: those of one folder.
        baseline: a balancing or the name of an arm; None takes the runs' own `baseline` key.
        metrics: the columns; None takes the usual ones.
        paper: whether the paper's numbers stand beside ours.
        missing: label by folder name of the runs that were never started.
        margin: of equivalence, in nats per token; None takes the runs' own `equivalence_margin`.
        pairs: compare every two arms; tokens to a loss are still those to the baseline's.
        models: of Hugging Face, which are compared with nothing.

    Raises:
        UserError: the curve of a run is broken, or a perplexity is not above 0.
    """
    finished = [run for run in runs if run.finished]
    columns = label_columns([run.spec for run in runs]) if runs or not models else ["model"]
    metrics = [*usual(finished), *usual_of_models(models)] if metrics is None else metrics
    baseline = own(runs, "baseline") if baseline is None else baseline
    margin = own(runs, "equivalence_margin") if margin is None else margin
    rows = compare(group(finished, columns), baseline, metrics, paper)
    every = every_pair(rows, metrics) if pairs else []
    if every:
        rows = [replace(row, differences={}) for row in rows]
    conclude(every or rows, metrics, margin)
    absent = [(short_label(label_of(run.spec, columns)), run) for run in runs if not run.finished]
    never = dict(missing or {})
    return Table(name, columns, metrics, rows, baseline, absent, paper, never, margin, every, models=models)


def _loss(row: Row) -> float:
    losses = row.arm.values("val/loss").values()
    return sum(losses) / len(losses) if losses else inf


def own(runs: Sequence[Run], key: str) -> Any:
    """Return a key of the runs' configs that is the same in all; None where it is not."""
    named = {getattr(run.spec.config, key) for run in runs}
    return named.pop() if len(named) == 1 else None
