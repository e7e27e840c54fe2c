"""The table of a folder's runs: one row per arm, with its differences from the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from simbal.metrics.definitions import Metric
from simbal.report.arms import group_runs, label_columns, label_of, short_label
from simbal.report.collect import MeasuredModel, Run
from simbal.report.columns import default_columns
from simbal.report.comparison import Row, compare, every_pair

NGRAMS = {1: "unigram", 2: "bigram"}


@dataclass(frozen=True, eq=False)  # compared by identity, so that its notes can be cached
class Table:
    """Everything that a rendering of the table shows."""

    name: str
    columns: list[str]  # the label columns
    metrics: Sequence[Metric]  # the columns of numbers
    rows: list[Row]
    baseline: str | None
    absent: list[tuple[str, Run]]  # runs without a result, each with its label
    paper: bool = False  # whether the paper's numbers were asked for
    chosen: bool = False  # whether the user chose the columns
    missing: dict[str, str] = field(default_factory=dict)  # labels by folder name of runs that were never started
    margin: float | None = None  # margin of equivalence in nats per token; None if the runs have different margins
    pairs: list[Row] = field(default_factory=list)  # comparisons of pairs of arms; `rows` then have no differences
    pairs_of: str = "every pair of arms"  # description of the pairs
    models: Sequence[MeasuredModel] = ()

    @property
    def compared(self) -> list[Row]:
        """The rows with differences."""
        return [row for row in self.pairs or self.rows if row.differences]

    @property
    def ngram_losses(self) -> dict[str, float]:
        """Validation losses of n-gram models of the runs' text by name: unigram, bigram and the best one."""
        losses = next((losses for row in self.rows for run in row.arm.runs if (losses := run.ngram_losses)), {})
        best = min(losses, key=losses.__getitem__, default=None)
        return {NGRAMS.get(n, f"{n}-gram"): loss for n, loss in losses.items() if n in NGRAMS or n == best}

    def best_arms(self, most: int) -> "Table":
        """Return a table of the `most` arms with the lowest validation loss, or fewer.

        An arm is included only together with the arm that it is compared with. All arms of the baseline are included if
        they are few.
        """
        if len(self.rows) <= most:
            return self
        baseline = {row.arm.name for row in self.rows if row.arm.is_baseline(self.baseline)}
        chosen = baseline if len(baseline) <= most // 2 else set()
        for row in sorted(self.rows, key=_mean_loss):
            more = {arm.name for arm in (row.arm, row.other) if arm}
            if len(chosen | more) <= most:
                chosen |= more
        rows = [row for row in self.rows if row.arm.name in chosen]
        pairs = [row for row in self.pairs if row.other and {row.arm.name, row.other.name} <= chosen]
        return replace(self, rows=rows, pairs=pairs)


def build(
    name: str, runs: Sequence[Run], baseline: str | None = None, metrics: Sequence[Metric] | None = None,
    paper: bool = False, margin: float | None = None, pairs: bool = False, models: Sequence[MeasuredModel] = (),
) -> Table:  # fmt: skip
    """Build the table. Each arm is compared with the arm of the baseline's balancing and otherwise equal config.

    Args:
        name: the title.
        runs: the runs of one folder.
        baseline: a balancing, or the name of an arm; None uses the config key `baseline` of the runs.
        metrics: the columns; None uses the config key `columns` of the runs, or the default columns.
        paper: whether to show the paper's numbers.
        margin: margin of equivalence in nats per token; None uses the config key `equivalence_margin` of the runs.
        pairs: compare every pair of arms instead of each arm with the baseline.
        models: Hugging Face models, which are not compared.

    Raises:
        UserError: the curve of a run is broken, or a perplexity is not positive.
    """
    finished = [run for run in runs if run.finished]
    columns = label_columns([run.spec for run in runs]) if runs or not models else ["model"]
    chosen = metrics is not None or any(run.spec.config.columns is not None for run in finished)
    metrics = default_columns(finished, models) if metrics is None else metrics
    baseline = shared_config_value(runs, "baseline") if baseline is None else baseline
    margin = shared_config_value(runs, "equivalence_margin") if margin is None else margin
    rows = compare(group_runs(finished, columns), baseline, metrics, margin, paper)
    compared = every_pair([row.arm for row in rows], metrics, margin) if pairs else []
    if compared:
        rows = [replace(row, differences={}) for row in rows]
    absent = absent_runs(runs, columns)
    return Table(
        name, columns, metrics, rows, baseline, absent, paper, chosen, margin=margin, pairs=compared, models=models
    )


def absent_runs(runs: Sequence[Run], columns: Sequence[str]) -> list[tuple[str, Run]]:
    """Return the runs without a result, each with its label."""
    return [(short_label(label_of(run.spec, columns)), run) for run in runs if not run.finished]


def shared_config_value(runs: Sequence[Run], key: str) -> Any:
    """Return the value of a config key if it is the same in all runs, else None."""
    values = {getattr(run.spec.config, key) for run in runs}
    return values.pop() if len(values) == 1 else None


def _mean_loss(row: Row) -> float:
    losses = row.arm.values("val/loss").values()
    return sum(losses) / len(losses) if losses else inf
