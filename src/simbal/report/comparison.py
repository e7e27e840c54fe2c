"""Compare the arms of a table: each with its baseline, in every metric, on the seeds that both have."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm
from simbal.report.bootstrap import DocumentDifferences, bootstrap, document_differences
from simbal.report.largest_t import ALPHA
from simbal.report.paper import Reported, reported
from simbal.report.simultaneous import Interval, simultaneous_intervals
from simbal.report.statistics import (
    IDENTICAL,
    NO_CONCLUSION,
    UNRESOLVED,
    Difference,
    Summary,
    logarithms,
    paired_difference,
    summarize,
)
from simbal.report.tokens_to_loss import TokensToLoss, tokens_to_loss

BARELY = 0.001  # nats per token: a conclusion that depends on less is printed as "barely"
UNITS_OF_LOSS = ("ppl", "bpb")  # metrics that measure the same as the loss of the same tokens
Pair = tuple[Arm, Arm]  # treatment and the arm that it is compared with


@dataclass(frozen=True)
class Row:
    """The numbers of one arm by metric key, and its differences from another arm, if it is compared."""

    arm: Arm
    summaries: dict[str, Summary | None]
    other: Arm | None = None  # the arm that it is compared with
    differences: dict[str, Difference] = field(default_factory=dict)
    tokens_to_loss: TokensToLoss | None = None
    reported: dict[str, Reported] = field(default_factory=dict)  # the paper's numbers


def compare(
    arms: Sequence[Arm], baseline: str | None, metrics: Sequence[Metric], margin: float | None = None,
    paper: bool = False, alpha: float = ALPHA,
) -> list[Row]:  # fmt: skip
    """Return a row for each arm, with the baseline first; `UserError` if a curve is broken.

    Args:
        arms: all arms of the table.
        baseline: a balancing, or the name of an arm.
        metrics: the columns.
        margin: margin of equivalence in nats per token; None if the runs have different margins.
        paper: whether to add the paper's numbers.
        alpha: error rate of all intervals of a metric together.
    """
    others = [found[0] if len(found) == 1 else None for found in baseline_arms(arms, baseline)]
    pairs = [(arm, other) for arm, other in zip(arms, others, strict=True) if other and other is not arm]
    differences = iter(compare_pairs(pairs, metrics, margin, alpha=alpha))
    rows = []
    for arm, other in zip(arms, others, strict=True):
        summaries = {metric.key: summarize([*arm.values(metric.key).values()]) for metric in metrics}
        row = Row(arm, summaries, reported=reported(arm, metrics) if paper and not arm.untrained else {})
        if other and other is not arm:
            row = replace(row, other=other, differences=next(differences))
            if not arm.untrained and not other.untrained:
                curves = (
                    {run.seed: run.loss_curve for run in one.runs} for one in (_without_copies(arm, other), other)
                )
                row = replace(row, tokens_to_loss=tokens_to_loss(*curves))
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


def every_pair(arms: Sequence[Arm], metrics: Sequence[Metric], margin: float | None) -> list[Row]:
    """Return a row for every pair of arms: the later arm minus the earlier arm."""
    pairs = [(arm, other) for place, arm in enumerate(arms) for other in arms[:place]]
    return rows_of_pairs(pairs, metrics, margin, all_pairs=True)


def rows_of_pairs(
    pairs: Sequence[Pair], metrics: Sequence[Metric], margin: float | None, all_pairs: bool = False
) -> list[Row]:
    """Return a row for each pair, without the numbers of the arms themselves."""
    compared = compare_pairs(pairs, metrics, margin, all_pairs)
    return [Row(arm, {}, other, differences) for (arm, other), differences in zip(pairs, compared, strict=True)]


def compare_pairs(
    pairs: Sequence[Pair], metrics: Sequence[Metric], margin: float | None, all_pairs: bool = False,
    alpha: float = ALPHA, documents: bool = True,
) -> list[dict[str, Difference]]:  # fmt: skip
    """Return the differences of each pair by metric key; none for a pair that shares no seed.

    Args:
        pairs: all comparisons of the table.
        metrics: the columns.
        margin: margin of equivalence in nats per token, for losses.
        all_pairs: `pairs` are all pairs of arms.
        alpha: error rate of all intervals of a metric together.
        documents: whether to add the intervals over documents, which take longest.
    """
    found: list[dict[str, Difference]] = [{} for _ in pairs]
    for metric in metrics:
        if metric.compared:
            for place, difference in enumerate(_compare_metric(pairs, metric, margin, all_pairs, alpha)):
                if difference:
                    found[place][metric.key] = difference
    if documents:
        keys = [metric.key for metric in metrics if metric.margin and metric.where == "val/"]
        _resample_documents(pairs, found, keys)
    return found


def conclusion_word(low: float, high: float, metric: Metric, margin: float | None) -> str:
    """Return what an interval of a difference says.

    It is better or worse (higher or lower if neither is good) if the interval excludes 0, equivalent if it lies within
    the margin, and not resolved otherwise.

    Args:
        low: lower end of the interval.
        high: upper end.
        metric: what is compared.
        margin: margin of equivalence in the unit of the interval; None: never equivalent.
    """
    if low > 0 or high < 0:
        slack = max(low, -high)
        if metric.better == "neither":
            word = "higher" if low > 0 else "lower"
        else:
            word = "better" if (high < 0) == (metric.better == "lower") else "worse"
    elif margin is not None and -margin < low and high < margin:
        slack, word = min(low + margin, margin - high), "equivalent"
    else:
        return UNRESOLVED
    return f"barely {word}" if metric.margin and slack < BARELY else word


def _compare_metric(
    pairs: Sequence[Pair], metric: Metric, margin: float | None, all_pairs: bool, alpha: float
) -> list[Difference | None]:
    """Return the difference of each pair in one metric.

    A perplexity and bits per byte have the conclusion of the loss, so that one result never has two conclusions.
    """
    intervals = _intervals(pairs, metric, all_pairs, alpha)
    loss = replace(metric, name="loss", ratio=False, margin=True) if metric.name in UNITS_OF_LOSS else metric
    deciding = intervals
    if loss.key != metric.key and all(arm.values(loss.key) for pair in pairs for arm in pair):
        deciding = _intervals(pairs, loss, all_pairs, alpha)
    else:
        loss = metric
    found = []
    for place, (arm, other) in enumerate(pairs):
        ours, theirs = _values(_without_copies(arm, other), metric), _values(other, metric)
        difference = paired_difference(ours, theirs, "ln" if metric.ratio else "difference")
        if difference and (interval := intervals.get(place)):
            difference = replace(
                difference, mean=interval.mean, low=interval.mean - interval.half, high=interval.mean + interval.half,
                error=interval.error, degrees=interval.degrees, p=interval.p, detectable=interval.detectable,
                pooled=interval.pooled, largest=interval.largest,
            )  # fmt: skip
        if difference and (decides := deciding.get(place)):
            low, high = decides.mean - decides.half, decides.mean + decides.half
            difference = replace(
                difference, conclusion=conclusion_word(low, high, loss, margin if loss.margin else None)
            )
        if difference and _are_identical(ours, theirs):
            difference = replace(difference, conclusion=IDENTICAL)
        if difference and (arm.untrained or other.untrained):
            difference = replace(difference, conclusion=NO_CONCLUSION)
        found.append(difference)
    return found


def _intervals(pairs: Sequence[Pair], metric: Metric, all_pairs: bool, alpha: float) -> dict[int, Interval]:
    """Return the interval of each pair by its place in `pairs`; none for identical or untrained arms."""
    names = {id(arm): str(place) for place, arm in enumerate({id(arm): arm for pair in pairs for arm in pair}.values())}
    cells: dict[str, dict[int, float]] = {}
    places: dict[tuple[str, str], int] = {}
    for place, (arm, other) in enumerate(pairs):
        ours, theirs = _values(_without_copies(arm, other), metric), _values(other, metric)
        if _are_identical(ours, theirs) or len(ours.keys() & theirs) < 2 or arm.untrained or other.untrained:
            continue
        name, other_name = names[id(arm)], names[id(other)]
        cells[name] = {seed: value for seed, value in ours.items() if seed in cells.get(name, ours)}
        cells.setdefault(other_name, theirs)
        places[name, other_name] = place
    found = simultaneous_intervals(cells, [*places], all_pairs and len(places) == len(pairs), alpha)
    return {places[pair]: interval for pair, interval in found.items()}


def _are_identical(ours: dict[int, float], theirs: dict[int, float]) -> bool:
    """Whether all shared seeds have equal values."""
    shared = ours.keys() & theirs
    return bool(shared) and all(ours[seed] == theirs[seed] for seed in shared)


def _without_copies(arm: Arm, other: Arm) -> Arm:
    """Return the arm without copies of the other arm's runs: a difference of 0 from a copy is not a measurement."""
    theirs = {run.spec.hash: run.record for run in other.runs}
    return replace(arm, runs=tuple(run for run in arm.runs if run.record != theirs.get(run.spec.hash)))


def _values(arm: Arm, metric: Metric) -> dict[int, float]:
    """Return a metric by seed, as logarithms for a ratio; `UserError` if one has no logarithm."""
    values = arm.values(metric.key)
    if not metric.ratio:
        return values
    for run in arm.runs:
        if values.get(run.seed, 1.0) <= 0:
            raise UserError(f"{run.path} cannot be compared: {metric.key}={values[run.seed]} must be greater than 0")
    return logarithms(values)


def _resample_documents(pairs: Sequence[Pair], compared: Sequence[dict[str, Difference]], keys: Sequence[str]) -> None:
    """Fill in the interval over documents for validation losses and perplexities, which have these keys."""
    splits: dict[tuple[int, ...], list[tuple[dict[str, Difference], DocumentDifferences]]] = defaultdict(list)
    for pair, differences in zip(pairs, compared, strict=True):
        if any(key in differences for key in keys) and (found := _documents(*pair)):
            splits[found.tokens].append((differences, found))
    for same in splits.values():
        for (differences, _), over in zip(same, bootstrap([found for _, found in same]), strict=True):
            for key in differences.keys() & keys:
                differences[key] = replace(differences[key], over_documents=over)


def _documents(arm: Arm, other: Arm) -> DocumentDifferences | None:
    """Return the differences by document on the seeds that both arms have."""
    ours, theirs = ({run.seed: run for run in one.runs} for one in (_without_copies(arm, other), other))
    shared = sorted(ours.keys() & theirs)
    return document_differences(*([runs[seed].documents for seed in shared] for runs in (ours, theirs)))
