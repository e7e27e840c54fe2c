"""The table of a folder's runs, a pure function of them: a row for each arm, and how far it is from the baseline's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simbal.errors import UserError
from simbal.files import strict_json
from simbal.files.disk import read_bytes
from simbal.files.printable import printable
from simbal.metrics.table import Metric
from simbal.report.arms import Arm, group, label_columns, label_of, short_label
from simbal.report.collect import Run
from simbal.report.columns import usual
from simbal.report.conclusion import concluded, examined
from simbal.report.paper import Reported, reported
from simbal.report.statistics import PairedDifference, Summary, holm, interval, paired_difference, summarize

LARGEST = 1 << 26  # bytes; of ten thousand runs it has a fiftieth of that
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


@dataclass(frozen=True)
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
            said = strict_json.parse(read_bytes(file, LARGEST))
            if all(isinstance(text, str) for text in (said["command"], *said["runs"].values())):
                return cls(said["command"], said["runs"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        raise UserError(f"{file} is broken: delete it; the runs in {folder} need it no more")

    def never_started(self, started: Collection[str]) -> dict[str, str]:
        """Return labels by folder name of the sweep's runs that are not in `started`."""
        return {printable(name): printable(label) for name, label in self.runs.items() if name not in started}


def build(
    name: str,
    runs: Sequence[Run],
    baseline: str | None = None,
    metrics: Sequence[Metric] | None = None,
    paper: bool = False,
    missing: Mapping[str, str] | None = None,
    margin: float | None = None,
) -> Table:
    """Build the table, which compares arms with the one whose balancing is `baseline` and whose other keys are equal.

    Args:
        name: what stands above it.
        runs: those of one folder.
        baseline: None takes the runs' own `baseline` key.
        metrics: the columns; None takes the usual ones.
        paper: whether the paper's numbers stand beside ours.
        missing: label by folder name of the runs that were never started.
        margin: of equivalence, in nats per token; None takes the runs' own `equivalence_margin`.

    Raises:
        UserError: the curve of a run is broken, or a perplexity is not above 0.
    """
    finished = [run for run in runs if run.finished]
    columns = label_columns([run.spec for run in runs])
    metrics = usual(finished) if metrics is None else metrics
    baseline = _own(runs, "baseline") if baseline is None else baseline
    margin = _own(runs, "equivalence_margin") if margin is None else margin
    rows = compare(group(finished, columns), baseline, metrics, paper)
    for metric in metrics:
        _conclude(rows, metric, margin)
    absent = [(short_label(label_of(run.spec, columns)), run) for run in runs if not run.finished]
    return Table(name, columns, metrics, rows, baseline, absent, paper, dict(missing or {}), margin)


def _own(runs: Sequence[Run], key: str) -> Any:
    """Return a key of the runs' configs that is the same in all; None where it is not."""
    named = {getattr(run.spec.config, key) for run in runs}
    return named.pop() if len(named) == 1 else None


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
    compared = [metric for metric in metrics if metric.compared]
    differences = {m.key: paired_difference(_values(arm, m), _values(other, m), m.ratio) for m in compared}
    return replace(
        row,
        differences={key: difference for key, difference in differences.items() if difference},
        tokens_to_loss=tokens_to_loss(*({run.seed: run.loss_curve for run in either.runs} for either in (arm, other))),
    )


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
    """Fill in what the differences by one metric conclude, with Holm's p where several arms are compared."""
    compared = [row.differences for row in rows if metric.key in row.differences]
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
    """Return Holm's p of those that are known."""
    corrected = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(corrected) for p in p_values]
