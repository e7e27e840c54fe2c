"""The aggregated table: a pure function of the runs in a folder, every number of which names its runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from simbal.sweep.arms import Arm, group, label_columns, label_of, short_label
from simbal.sweep.collect import Run
from simbal.sweep.metric import METRICS, Metric
from simbal.sweep.statistics import PairedDifference, Summary, paired_difference, summarize

SMALL_SAMPLE = 5  # seeds; with 6 pairs a sign-flip test can reach p = 0.031


@dataclass(frozen=True)
class Row:
    """One arm's numbers by metric key; no `differences` for the baseline, or where there is none to compare with."""

    arm: Arm
    summaries: dict[str, Summary | None]
    differences: dict[str, PairedDifference] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Everything that a rendering shows."""

    name: str
    columns: list[str]  # of the labels
    metrics: Sequence[Metric]  # the columns of numbers
    rows: list[Row]
    baseline: str | None
    absent: list[tuple[str, Run]]  # failed and unfinished runs, each with its label
    notes: list[str]


def build(name: str, runs: Sequence[Run], baseline: str | None = None, metrics: Sequence[Metric] = METRICS) -> Table:
    """Compare the arms in `runs` with the arm whose balancing is `baseline` and whose other keys are the same.

    Without a `baseline` the runs' own `baseline` key is taken.
    """
    arms = group(runs)
    if baseline is None:
        baseline = _own_baseline(runs)
    rivals = {arm.name: _rivals(arm, arms, baseline) for arm in arms}
    rows = [_row(arm, rivals[arm.name], metrics) for arm in arms]
    rows.sort(key=lambda row: row.arm.balancing != baseline)  # stable: the baseline's arms come first
    columns = label_columns([run.spec for run in runs])
    absent = [(short_label(label_of(run.spec, columns)), run) for run in runs if not run.finished]
    notes = [*_why_no_difference(rows, rivals, baseline), *_warnings(rows), *_footer(runs, metrics)]
    return Table(name, columns, metrics, rows, baseline, absent, notes)


def _own_baseline(runs: Sequence[Run]) -> str | None:
    named = {str(run.spec.config["baseline"]) for run in runs}
    return named.pop() if len(named) == 1 else None


def _rivals(arm: Arm, arms: Sequence[Arm], baseline: str | None) -> list[Arm]:
    """The arms to compare with: they have the baseline's balancing, and all else is the same."""
    return [other for other in arms if other.balancing == baseline and other.setting == arm.setting]


def _row(arm: Arm, rivals: Sequence[Arm], metrics: Sequence[Metric]) -> Row:
    summaries = {metric.key: summarize([*arm.values(metric.key).values()]) for metric in metrics}
    if len(rivals) != 1 or rivals[0] is arm:
        return Row(arm, summaries)
    compared = [metric.key for metric in metrics if metric.compared]
    differences = {key: paired_difference(arm.values(key), rivals[0].values(key)) for key in compared}
    return Row(arm, summaries, {key: difference for key, difference in differences.items() if difference})


def _why_no_difference(rows: Sequence[Row], rivals: dict[str, list[Arm]], baseline: str | None) -> list[str]:
    if baseline is None:
        return ["No difference is shown: the runs name several baselines; choose one with baseline=."]
    others = [row.arm.name for row in rows if row.arm.balancing != baseline and not row.differences]
    if len(rows) > 1 and all(row.arm.balancing == baseline for row in rows):
        return [f"No difference is shown: every arm is the baseline, balancing={baseline}."]
    reasons = (
        (
            [n for n in others if not rivals[n]],
            f"no finished run has balancing={baseline}, the baseline, and all else the same",
        ),
        ([n for n in others if len(rivals[n]) > 1], f"several arms are the baseline, balancing={baseline}"),
        ([n for n in others if len(rivals[n]) == 1], "it shares no seed with the baseline"),
    )
    return [f"No difference is shown for {', '.join(names)}: {why}." for names, why in reasons if names]


def _warnings(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of so few seeds."""
    notes = []
    if any(len(row.arm.runs) == 1 for row in rows):
        notes.append("One seed has no standard deviation, and one pair of seeds no interval: a dash.")
    largest = max((len(row.arm.runs) for row in rows), default=0)
    if 2 <= largest <= SMALL_SAMPLE:
        notes.append(
            f"{largest} seeds are few: the intervals lean on the differences being normal, and a sign-flip test of "
            f"{largest} pairs cannot give p below {2 / 2**largest:.4g}. Six seeds (seed=0-5) can reach 0.05."
        )
    if any(row.differences for row in rows):
        notes.append("Intervals are 95% each, not corrected for how many there are.")
    return notes


def _footer(runs: Sequence[Run], metrics: Sequence[Metric]) -> list[str]:
    """What the numbers mean, on which data, after how much training."""
    finished = [run for run in runs if run.finished]
    if not finished:
        return []
    records = [run.result for run in finished]
    definitions = {key: text for run in finished for key, text in run.definitions.items()}
    notes = [f"{m.title}: {definitions[m.key]}." for m in metrics if m.key in definitions]
    steps, tokens = (_range([record[key] for record in records]) for key in ("steps", "tokens"))
    source, fingerprint = finished[0].spec.config["data"]["source"], records[0]["data"]["tokens"]
    notes.append(f"{steps} steps and {tokens} tokens per run; data {source}, tokens {fingerprint[:16]}.")
    return notes


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
