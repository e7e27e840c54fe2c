"""Compares arms: one row for each, with its numbers and how far they are from those of the baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simbal.metrics.table import Metric
from simbal.report.arms import Arm
from simbal.report.paper import Reported, reported
from simbal.report.statistics import PairedDifference, Summary, holm, interval, paired_difference, summarize

Curve = Sequence[tuple[int, float]]  # (training tokens, validation loss), by tokens


@dataclass(frozen=True)
class TokensToLoss:
    """An arm's tokens up to the baseline's final validation loss, as a share of the baseline's tokens.

    The saving is 1 - share. Where a seed never reaches that loss there is no mean: one over the other seeds would tell
    of the lucky ones alone.
    """

    shares: dict[int, float | None]  # by shared seed; None: not reached
    saving: float | None  # mean over the seeds
    low: float | None  # lower end of Student's 95% interval; None also for a single seed
    high: float | None
    validations: int  # the fewest in any of the curves

    @property
    def missed(self) -> list[int]:
        """The seeds that never reach the loss."""
        return [seed for seed, share in self.shares.items() if share is None]


@dataclass(frozen=True)
class Row:
    """The numbers of one arm by metric key; the baseline, and an arm without one, has no `differences`."""

    arm: Arm
    summaries: dict[str, Summary | None]
    differences: dict[str, PairedDifference] = field(default_factory=dict)
    tokens_to_loss: TokensToLoss | None = None
    reported: dict[str, Reported] = field(default_factory=dict)  # the paper's numbers, for columns that it has


def compare(arms: Sequence[Arm], baseline: str | None, metrics: Sequence[Metric], paper: bool) -> list[Row]:
    """Return the rows, those of the baseline first, else in the order of `arms`; `UserError` if a curve is broken.

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


def rivals(arm: Arm, arms: Sequence[Arm], baseline: str | None) -> list[Arm]:
    """Return the arms to compare with: they have the baseline's balancing, and all else is the same."""
    return [other for other in arms if other.balancing == baseline and other.setting == arm.setting]


def tokens_to_loss(treatment: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> TokensToLoss | None:
    """Compare the curves of shared seeds; None if no seed has both.

    Args:
        treatment: curves by seed.
        baseline: curves by seed; the loss to reach is the last of each.
    """
    shared = [seed for seed in sorted(treatment.keys() & baseline) if treatment[seed] and _tokens(baseline[seed])]
    if not shared:
        return None
    shares: dict[int, float | None] = {}
    for seed in shared:
        reached = first_reach(treatment[seed], baseline[seed][-1][1])
        shares[seed] = None if reached is None else reached / _tokens(baseline[seed])
    validations = min(len(curves[seed]) for curves in (treatment, baseline) for seed in shared)
    savings = summarize([1 - share for share in shares.values() if share is not None])
    if savings is None or None in shares.values():
        return TokensToLoss(shares, None, None, None, validations)
    return TokensToLoss(shares, savings.mean, *interval(savings), validations)


def first_reach(curve: Curve, loss: float) -> float | None:
    """Return the tokens at which a curve is first as low as `loss`, by linear interpolation; None: never."""
    before: tuple[int, float] | None = None
    for tokens, value in curve:
        if value <= loss:
            if before is None:
                return float(tokens)
            return before[0] + (tokens - before[0]) * ((before[1] - loss) / (before[1] - value))
        before = tokens, value
    return None


def _tokens(curve: Curve) -> int:
    """Return the tokens of a curve's last point; 0 if it has none."""
    return curve[-1][0] if curve else 0


def _row(arm: Arm, others: Sequence[Arm], metrics: Sequence[Metric], paper: bool) -> Row:
    row = Row(
        arm,
        {metric.key: summarize([*arm.values(metric.key).values()]) for metric in metrics},
        reported=reported(arm, metrics) if paper else {},
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
