"""The aggregated table: a pure function of the runs in a folder, every number of which names its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simbal.printable import printable
from simbal.table.arms import group, label_columns, label_of, short_label
from simbal.table.collect import Run
from simbal.table.comparison import Row, compare
from simbal.table.metric import Metric, usual
from simbal.table.notes import footer, of_paper, warnings, why_no_difference

__all__ = ["Row", "Table", "build"]


@dataclass(frozen=True)
class Table:
    """Everything that a rendering shows."""

    name: str
    columns: list[str]  # of the labels
    metrics: Sequence[Metric]  # the columns of numbers
    rows: list[Row]
    baseline: str | None
    absent: list[tuple[str, Run]]  # failed, diverged, killed, pruned, damaged and unfinished runs, each with its label
    notes: list[str]
    missing: dict[str, str] = field(default_factory=dict)  # label by folder name of the runs that were never started


def build(
    name: str,
    runs: Sequence[Run],
    baseline: str | None = None,
    metrics: Sequence[Metric] | None = None,
    paper: bool = False,
    missing: Mapping[str, str] | None = None,
) -> Table:
    """Compare the arms in `runs` with the arm whose balancing is `baseline` and whose other keys are the same.

    Args:
        name: what stands above it.
        runs: those of one folder.
        baseline: None takes the runs' own `baseline` key.
        metrics: the columns; None takes the usual ones.
        paper: whether the paper's numbers stand beside ours.
        missing: label by folder name of the runs that were never started.

    Raises:
        UserError: the curve of a run is broken.
    """
    finished = [run for run in runs if run.finished]
    columns = label_columns([run.spec for run in runs])
    metrics = usual(finished) if metrics is None else metrics
    baseline = _own_baseline(runs) if baseline is None else baseline
    rows = compare(group(finished, columns), baseline, metrics, paper)
    notes = [*why_no_difference(rows, baseline), *warnings(rows, baseline), *(of_paper(rows) if paper else [])]
    absent = [(short_label(label_of(run.spec, columns)), run) for run in runs if not run.finished]
    notes = [printable(note) for note in notes + footer(runs, metrics)]
    return Table(name, columns, metrics, rows, baseline, absent, notes, dict(missing or {}))


def _own_baseline(runs: Sequence[Run]) -> str | None:
    named = {str(run.spec.config["baseline"]) for run in runs}
    return named.pop() if len(named) == 1 else None
