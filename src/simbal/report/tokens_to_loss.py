"""Training tokens that an arm needs to become as good as the baseline, seed by seed, and what that saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import linear_regression

from simbal.report.statistics import ROUNDING, Summary, interval, relative, summarize

Curve = Sequence[tuple[int, float]]  # (training tokens, validation loss), by tokens
PAPER_SAVING = 0.36  # arXiv 2506.14038, of its larger models
FEWEST = 3  # points of a slope: two have no noise that a line could smooth


@dataclass(frozen=True)
class SlopeSaving:
    """Tokens saved by the slope of the baseline's curve, in ln tokens: the share saved is 1 - exp of minus that.

    Unlike a first crossing it is there, wherever the baseline's loss still falls, for better and worse arms alike: one
    that is as much worse has the same saving with the other sign.
    """

    savings: dict[int, float]  # by shared seed
    mean: float
    low: float | None  # lower end of Student's 95% interval; None for a single seed, or where all seeds save the same
    high: float | None

    @property
    def shares(self) -> tuple[float, float | None, float | None]:
        """The share of tokens saved, and the ends of its interval."""
        low, high = (None if end is None else -relative(-end) for end in (self.low, self.high))
        return -relative(-self.mean), low, high


@dataclass(frozen=True)
class TokensToLoss:
    """An arm's tokens up to the baseline's final validation loss, as a share of the baseline's tokens.

    The saving is 1 - share. Where a seed never reaches that loss there is no mean: one over the other seeds would tell
    of the lucky ones alone.
    """

    shares: dict[int, float | None]  # by shared seed; None: not reached
    saving: float | None  # mean over the seeds
    low: float | None  # lower end of Student's 95% interval; None also as of SlopeSaving
    high: float | None
    validations: int  # the fewest in any of the curves
    by_slope: SlopeSaving | None = None  # None: some baseline's curve has no falling slope at its end

    @property
    def missed(self) -> list[int]:
        """The seeds that never reach the loss."""
        return [seed for seed, share in self.shares.items() if share is None]


def tokens_to_loss(treatment: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> TokensToLoss | None:
    """Compare the curves of shared seeds; None if no seed has both.

    Args:
        treatment: curves by seed.
        baseline: curves by seed; the loss to reach is the last of each.
    """
    both = treatment, baseline
    shared = [seed for seed in sorted(treatment.keys() & baseline) if all(_tokens(curves[seed]) for curves in both)]
    if not shared:
        return None
    shares: dict[int, float | None] = {}
    for seed in shared:
        reached = first_reach(treatment[seed], baseline[seed][-1][1])
        shares[seed] = None if reached is None else reached / _tokens(baseline[seed])
    validations = min(len(curves[seed]) for curves in both for seed in shared)
    by_slope = saved_by_slope(*({seed: curves[seed] for seed in shared} for curves in both))
    savings = summarize([1 - share for share in shares.values() if share is not None])
    if savings is None or None in shares.values():
        return TokensToLoss(shares, None, None, None, validations, by_slope)
    return TokensToLoss(shares, savings.mean, *_interval(savings), validations, by_slope)


def saved_by_slope(treatment: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> SlopeSaving | None:
    """Return the final difference of losses by the slope of the baseline's curve, with Student's interval over seeds.

    What the treatment was trained longer than the baseline is not saved. None if the curve of some seed of the baseline
    does not fall at its end.

    Args:
        treatment: curves by seed, each with tokens at its end.
        baseline: curves of the same seeds, one or more.
    """
    savings = {}
    for seed, curve in baseline.items():
        slope = final_slope(curve)
        if slope is None or slope >= 0:
            return None
        (tokens, loss), (its_tokens, its_loss) = curve[-1], treatment[seed][-1]
        savings[seed] = (loss - its_loss) / -slope - log(its_tokens / tokens)
    summary = summarize([*savings.values()])
    assert summary
    return SlopeSaving(savings, summary.mean, *_interval(summary))


def final_slope(curve: Curve) -> float | None:
    """Return the slope of the loss against ln tokens at a curve's end, in nats; None of fewer than three points.

    It is of the least-squares line through the points of the last half in ln tokens: those from the geometric mean of
    the first and last tokens on, or the last three if there are fewer.
    """
    points = [(log(tokens), loss) for tokens, loss in curve if tokens > 0]
    if len(points) < FEWEST:
        return None
    middle = (points[0][0] + points[-1][0]) / 2
    half = [point for point in points if point[0] >= middle]
    xs, ys = zip(*(half if len(half) >= FEWEST else points[-FEWEST:]), strict=True)
    return linear_regression(xs, ys).slope if xs[0] < xs[-1] else None


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


def _interval(savings: Summary) -> tuple[float | None, float | None]:
    """Return Student's 95% interval; none where every seed saves the same, as of differences: no noise was measured."""
    return interval(savings) if savings.sd is not None and savings.sd > ROUNDING else (None, None)


def _tokens(curve: Curve) -> int:
    """Return the tokens of a curve's last point; 0 if it has none."""
    return curve[-1][0] if curve else 0
