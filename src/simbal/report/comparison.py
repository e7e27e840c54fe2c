"""Compare the arms of a table: each with the baseline, in every metric, on the seeds that both have."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm
from simbal.report.bootstrap import DocumentDifferences, bootstrap, document_differences
from simbal.report.paper import Reported, reported
from simbal.report.statistics import (
    PairedDifference,
    Summary,
    conclusion_word,
    holm,
    paired_difference,
    summarize,
    with_power,
)
from simbal.report.tokens_to_loss import TokensToLoss, tokens_to_loss


@dataclass(frozen=True)
class Row:
    """The numbers of one arm by metric key, and its differences from another arm, if it is compared."""

    arm: Arm
    summaries: dict[str, Summary | None]
    other: Arm | None = None  # the arm that it is compared with
    differences: dict[str, PairedDifference] = field(default_factory=dict)
    tokens_to_loss: TokensToLoss | None = None
    reported: dict[str, Reported] = field(default_factory=dict)  # the paper's numbers


def compare(arms: Sequence[Arm], baseline: str | None, metrics: Sequence[Metric], paper: bool) -> list[Row]:
    """Return a row for each arm, with the baseline first; `UserError` if a curve is broken.

    Args:
        arms: all arms of the table.
        baseline: a balancing, or the name of an arm.
        metrics: the columns.
        paper: whether to add the paper's numbers.
    """
    rows = []
    for arm, others in zip(arms, baseline_arms(arms, baseline), strict=True):
        summaries = {metric.key: summarize([*arm.values(metric.key).values()]) for metric in metrics}
        row = Row(arm, summaries, reported=reported(arm, metrics) if paper else {})
        if len(others) == 1 and others[0] is not arm:
            (other,) = others
            curves = ({run.seed: run.loss_curve for run in one.runs} for one in (_without_copies(arm, other), other))
            row_differences = differences(arm, other, metrics)
            row = replace(row, other=other, differences=row_differences, tokens_to_loss=tokens_to_loss(*curves))
        rows.append(row)
    return sorted(rows, key=lambda row: not row.arm.is_baseline(baseline))


def baseline_arms(arms: Sequence[Arm], baseline: str | None) -> list[list[Arm]]:
    """Return the arms to compare each arm with.

    `baseline` is a balancing, whose arms with otherwise equal config are returned, or the name of one arm.
    """
    by_setting = defaultdict(list)
    for arm in arms:
        if arm.balancing == baseline:
            by_setting[arm.setting].append(arm)
    if by_setting:
        return [by_setting.get(arm.setting, []) for arm in arms]
    return [[arm for arm in arms if arm.name == baseline]] * len(arms)


def every_pair(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Row]:
    """Return a row for every pair of arms: the later arm minus the earlier arm."""
    arms = [row.arm for row in rows]
    pairs = [(arm, other) for place, arm in enumerate(arms) for other in arms[:place]]
    return [Row(arm, {}, other, differences(arm, other, metrics)) for arm, other in pairs]


def differences(arm: Arm, other: Arm, metrics: Sequence[Metric]) -> dict[str, PairedDifference]:
    """Return arm minus other by metric key; an empty dict if they share no seed."""
    arm = _without_copies(arm, other)
    compared = [metric for metric in metrics if metric.compared]
    by_key = {m.key: paired_difference(_values(arm, m), _values(other, m), m.ratio) for m in compared}
    return {key: difference for key, difference in by_key.items() if difference}


def conclude(rows: Sequence[Row], metrics: Sequence[Metric], margin: float | None) -> None:
    """Fill in the conclusions of the differences, with Holm's p if several arms are compared.

    Args:
        rows: all rows over which to correct.
        metrics: the columns.
        margin: margin of equivalence in nats per token; None if the runs have different margins.
    """
    for metric in metrics:
        _conclude_metric(rows, metric, margin if metric.margin else None)
    _resample_documents(rows, metrics)


def _conclude_metric(rows: Sequence[Row], metric: Metric, margin: float | None) -> None:
    compared = [row.differences for row in rows if (one := row.differences.get(metric.key)) and one.pairs > 1]
    tested = [with_power(differences[metric.key], margin) for differences in compared]
    if len(tested) > 1:
        different = _holm_of_known([one.p for one in tested])
        equivalent = _holm_of_known([one.p_equivalent for one in tested])
        tested = [
            replace(one, p_holm=p_holm, p_equivalent=p_equivalent)
            for one, p_holm, p_equivalent in zip(tested, different, equivalent, strict=True)
        ]
    for differences, one in zip(compared, tested, strict=True):
        differences[metric.key] = replace(one, conclusion=conclusion_word(one, metric.better))


def _holm_of_known(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct the known p-values. Missing p-values count as 1, because which ones are missing depends on the data."""
    corrected = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else one for p, one in zip(p_values, corrected, strict=True)]


def _without_copies(arm: Arm, other: Arm) -> Arm:
    """Return the arm without copies of the other arm's runs: a difference of 0 from a copy is not a measurement."""
    theirs = {run.spec.hash: run.record for run in other.runs}
    return replace(arm, runs=tuple(run for run in arm.runs if run.record != theirs.get(run.spec.hash)))


def _values(arm: Arm, metric: Metric) -> dict[int, float]:
    """Return a metric by seed; `UserError` if a ratio metric is not positive."""
    values = arm.values(metric.key)
    for run in arm.runs:
        if metric.ratio and values.get(run.seed, 1.0) <= 0:
            raise UserError(f"{run.path} cannot be compared: {metric.key}={values[run.seed]} must be greater than 0")
    return values


def _resample_documents(rows: Sequence[Row], metrics: Sequence[Metric]) -> None:
    """Fill in the interval over documents for validation losses and perplexities."""
    keys = [metric.key for metric in metrics if metric.margin and metric.where == "val/"]
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
    ours, theirs = ({run.seed: run for run in one.runs} for one in (_without_copies(arm, other), other))
    shared = sorted(ours.keys() & theirs)
    return document_differences(*([runs[seed].documents for seed in shared] for runs in (ours, theirs)))
