"""One row for each arm: its numbers, and how far they are from those of the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simbal.table.arms import Arm
from simbal.table.metric import Metric
from simbal.table.paper import Reported, reported
from simbal.table.statistics import PairedDifference, Summary, holm, paired_difference, summarize
from simbal.table.tokens_to_loss import TokensToLoss, tokens_to_loss


@dataclass(frozen=True)
class Row:
    """One arm's numbers by metric key; no `differences` for the baseline, or where there is none to compare with."""

    arm: Arm
    summaries: dict[str, Summary | None]
    differences: dict[str, PairedDifference] = field(default_factory=dict)
    tokens_to_loss: TokensToLoss | None = None
    reported: dict[str, Reported] = field(default_factory=dict)  # by the paper, for columns that it has


def rivals(arm: Arm, arms: Sequence[Arm], baseline: str | None) -> list[Arm]:
    """The arms to compare with: they have the baseline's balancing, and all else is the same."""
    return [other for other in arms if other.balancing == baseline and other.setting == arm.setting]


def compare(arms: Sequence[Arm], baseline: str | None, metrics: Sequence[Metric], paper: bool) -> list[Row]:
    """The rows, those of the baseline first, else in the order of `arms`; `UserError` if a curve is broken.

    Args:
        arms: all that the table has.
        baseline: balancing of the arms to compare with.
        metrics: the columns.
        paper: whether to set the paper's numbers beside ours.
    """
    rows = [_row(arm, rivals(arm, arms, baseline), metrics, paper) for arm in arms]
    rows.sort(key=lambda row: row.arm.balancing != baseline)
    for metric in metrics:
        _correct(rows, metric.key)
    return rows


def _row(arm: Arm, others: Sequence[Arm], metrics: Sequence[Metric], paper: bool) -> Row:
    row = Row(
        arm,
        {metric.key: summarize([*arm.values(metric.key).values()]) for metric in metrics},
        reported=reported(arm, [metric.key for metric in metrics]) if paper else {},
    )
    if len(others) != 1 or others[0] is arm:
        return row
    (other,) = others
    compared = [metric.key for metric in metrics if metric.compared]
    differences = {key: paired_difference(arm.values(key), other.values(key)) for key in compared}
    return replace(
        row,
        differences={key: difference for key, difference in differences.items() if difference},
        tokens_to_loss=tokens_to_loss(*({run.seed: run.loss_curve for run in either.runs} for either in (arm, other))),
    )


def _correct(rows: Sequence[Row], key: str) -> None:
    """Fill in Holm's p where several arms are compared by one metric."""
    compared = [row.differences for row in rows if key in row.differences]
    tested = [(differences, p) for differences in compared if (p := differences[key].p) is not None]
    if len(compared) > 1:
        for (differences, _), p_holm in zip(tested, holm([p for _, p in tested]), strict=True):
            differences[key] = replace(differences[key], p_holm=p_holm)
