"""Compares the arms of a table: each with the baseline, in every number, by the seeds that both have."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm
from simbal.report.conclusion import concluded, examined
from simbal.report.documents import DocumentDifferences, bootstrap, document_differences
from simbal.report.paper import Reported, reported
from simbal.report.statistics import PairedDifference, Summary, holm, paired_difference, summarize
from simbal.report.tokens_to_loss import TokensToLoss, tokens_to_loss

VALIDATION_PLACE = "val/"


@dataclass(frozen=True)
class Row:
    """The numbers of one arm by metric key; the baseline, and an arm without one, is not compared."""

    arm: Arm
    summaries: dict[str, Summary | None]
    other: Arm | None = None  # what it is compared with
    differences: dict[str, PairedDifference] = field(default_factory=dict)
    tokens_to_loss: TokensToLoss | None = None
    reported: dict[str, Reported] = field(default_factory=dict)  # the paper's numbers, for columns that it has


def compare(arms: Sequence[Arm], baseline: str | None, metrics: Sequence[Metric], paper: bool) -> list[Row]:
    """Return the rows, those of the baseline first, else in the order of `arms`; `UserError` if a curve is broken.

    Args:
        arms: all that the table has.
        baseline: balancing of the arms to compare with, or the name of one.
        metrics: the columns.
        paper: whether to set the paper's numbers beside ours.
    """
    rows = [_row(arm, others, metrics, paper) for arm, others in zip(arms, rivals(arms, baseline), strict=True)]
    rows.sort(key=lambda row: not row.arm.answers_to(baseline))
    return rows


def every_pair(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Row]:
    """Return a row for every two arms, the later minus the earlier, without the numbers of the arms themselves."""
    arms = [row.arm for row in rows]
    pairs = [(arm, other) for place, arm in enumerate(arms) for other in arms[:place]]
    return [Row(arm, {}, other, differences(arm, other, metrics)) for arm, other in pairs]


def rivals(arms: Sequence[Arm], baseline: str | None) -> list[list[Arm]]:
    """Return what to compare each arm with: the arm of that name, or those of that balancing with all else the same."""
    by_setting = defaultdict(list)
    for arm in arms:
        if arm.balancing == baseline:
            by_setting[arm.setting].append(arm)
    if by_setting:
        return [by_setting.get(arm.setting, []) for arm in arms]
    return [[arm for arm in arms if arm.name == baseline]] * len(arms)


def _row(arm: Arm, others: Sequence[Arm], metrics: Sequence[Metric], paper: bool) -> Row:
    row = Row(
        arm,
        {metric.key: summarize([*arm.values(metric.key).values()]) for metric in metrics},
        reported=reported(arm, metrics) if paper else {},
    )
    if len(others) != 1 or others[0] is arm:
        return row
    (other,) = others
    own = _own_runs(arm, other)
    return replace(
        row,
        other=other,
        differences=differences(arm, other, metrics),
        tokens_to_loss=tokens_to_loss(*({run.seed: run.loss_curve for run in either.runs} for either in (own, other))),
    )


def differences(arm: Arm, other: Arm, metrics: Sequence[Metric]) -> dict[str, PairedDifference]:
    """Return arm minus other by the keys of the metrics that are compared; none if they share no seed."""
    arm = _own_runs(arm, other)
    compared = [metric for metric in metrics if metric.compared]
    found = {m.key: paired_difference(_values(arm, m), _values(other, m), m.ratio) for m in compared}
    return {key: difference for key, difference in found.items() if difference}


def conclude(rows: Sequence[Row], metrics: Sequence[Metric], margin: float | None) -> None:
    """Fill in what the differences conclude, with Holm's p where there are several by one metric.

    Args:
        rows: all that the correction is over.
        metrics: the columns.
        margin: of equivalence, in nats per token; None: the runs name several.
    """
    for metric in metrics:
        _conclude(rows, metric, margin)
    _resample(rows, metrics)


def _own_runs(arm: Arm, other: Arm) -> Arm:
    """Return the arm without copies of the other's runs, in another folder: their difference of 0 is no measurement."""
    theirs = {run.spec.hash: run.record for run in other.runs}
    return replace(arm, runs=tuple(run for run in arm.runs if run.record != theirs.get(run.spec.hash)))


def _values(arm: Arm, metric: Metric) -> dict[int, float]:
    """Return a metric by seed; `UserError` for a ratio with a value that is not above 0."""
    values = arm.values(metric.key)
    for run in arm.runs:
        if metric.ratio and values.get(run.seed, 1.0) <= 0:
            raise UserError(
                f"{run.path} cannot be compared: its {metric.key} is {values[run.seed]}, which must be above 0"
            )
    return values


def _conclude(rows: Sequence[Row], metric: Metric, margin: float | None) -> None:
    """Fill in what the differences by one metric conclude, with Holm's p where several arms have pairs to test."""
    compared = [row.differences for row in rows if (one := row.differences.get(metric.key)) and one.pairs > 1]
    found = [examined(differences[metric.key], metric, margin) for differences in compared]
    if len(compared) > 1:
        different, same = (_corrected([getattr(one, p) for one in found]) for p in ("p", "p_equivalent"))
        found = [
            replace(one, p_holm=p_holm, p_equivalent=p_equivalent)
            for one, p_holm, p_equivalent in zip(found, different, same, strict=True)
        ]
    for differences, one in zip(compared, found, strict=True):
        differences[metric.key] = replace(one, conclusion=concluded(one, metric.better))


def _corrected(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's p of those that are known; the others count as 1: which have a p, the data themselves decide."""
    corrected = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else one for p, one in zip(p_values, corrected, strict=True)]


def _resample(rows: Sequence[Row], metrics: Sequence[Metric]) -> None:
    """Fill in the interval over documents of the validation's losses and perplexities, where the runs have them."""
    keys = [metric.key for metric in metrics if metric.margin and metric.where == VALIDATION_PLACE]
    splits: dict[tuple[int, ...], list[tuple[Row, DocumentDifferences]]] = defaultdict(list)
    for row in rows:
        if row.other and any(key in row.differences for key in keys) and (found := _documents(row.arm, row.other)):
            splits[found.tokens].append((row, found))
    for same in splits.values():
        for (row, _), over in zip(same, bootstrap([found for _, found in same]), strict=True):
            for key in row.differences.keys() & keys:
                row.differences[key] = replace(row.differences[key], over_documents=over)


def _documents(arm: Arm, other: Arm) -> DocumentDifferences | None:
    """Return the differences by document on the seeds that both arms have."""
    ours, theirs = ({run.seed: run for run in either.runs} for either in (_own_runs(arm, other), other))
    shared = sorted(ours.keys() & theirs)
    return document_differences(*([runs[seed].documents for seed in shared] for runs in (ours, theirs)))
