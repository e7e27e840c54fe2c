"""Training tokens that an arm needs to match the baseline's final loss, per seed, and the tokens it saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import linear_regression

from simbal.report.statistics import ROUNDING, Summary, interval, relative, summarize

Curve = Sequence[tuple[int, float]]  # (training tokens, validation loss), sorted by tokens
PAPER_SAVING = 0.36  # arXiv 2506.14038, for its larger models
FEWEST_POINTS = 3  # for a slope: a line through two points does not average out noise


@dataclass(frozen=True)
class SlopeSaving:
    """Savings from the slope of the baseline's curve, in ln tokens; the fraction saved is 1 - exp(-saving).

    Unlike the first crossing, they exist for better and worse arms alike, if the baseline's loss still falls at the
    end. Two arms that are better and worse by the same amount have savings of opposite signs.
    """

    savings: dict[int, float]  # by shared seed
    mean: float
    low: float | None  # lower end of Student's 95% interval; None for a single seed or if all savings are equal
    high: float | None

    @property
    def shares(self) -> tuple[float, float | None, float | None]:
        """The fraction of tokens saved, with the ends of the 95% interval."""
        low, high = (None if end is None else -relative(-end) for end in (self.low, self.high))
        return -relative(-self.mean), low, high


@dataclass(frozen=True)
class TokensToLoss:
    """Tokens to the baseline's final validation loss, as a fraction of the baseline's tokens; saving is 1 - fraction.

    If a seed never reaches that loss, no mean is given: a mean over the other seeds would be biased.
    """

    shares: dict[int, float | None]  # by shared seed; None: never reached
    saving: float | None  # mean over seeds
    low: float | None  # lower end of Student's 95% interval; None as for SlopeSaving
    high: float | None
    validations: int  # the smallest number of validations in any of the curves
    by_slope: SlopeSaving | None = None  # None: a curve of the baseline does not fall at its end

    @property
    def missed(self) -> list[int]:
        """The seeds that never reach the loss."""
        return [seed for seed, share in self.shares.items() if share is None]


def tokens_to_loss(treatment: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> TokensToLoss | None:
    """Compare the curves of shared seeds; None if no seed has both curves.

    Args:
        treatment: curves by seed.
        baseline: curves by seed; the loss to reach is the last loss of each curve.
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
    """Divide the final difference of losses by the final slope of the baseline's curve.

    If the treatment was trained on more tokens than the baseline, the savings are reduced accordingly.

    Args:
        treatment: curves by seed.
        baseline: curves of the same seeds, at least one.

    Returns:
        The savings, or None if a baseline curve does not fall at its end.
    """
    savings = {}
    for seed, curve in baseline.items():
        slope = final_slope(curve)
        if slope is None or slope >= 0:
            return None
        (tokens, loss), (treatment_tokens, treatment_loss) = curve[-1], treatment[seed][-1]
        savings[seed] = (loss - treatment_loss) / -slope - log(treatment_tokens / tokens)
    summary = summarize([*savings.values()])
    assert summary
    return SlopeSaving(savings, summary.mean, *_interval(summary))


def final_slope(curve: Curve) -> float | None:
    """Return the slope of the loss against ln tokens at the end of a curve; None for fewer than three points.

    It is a least-squares fit to the last half of the tokens, or to the last three points if that half has fewer.
    """
    points = [(log(tokens), loss) for tokens, loss in curve if tokens > 0]
    if len(points) < FEWEST_POINTS:
        return None
    half = [point for point in points if point[0] >= points[-1][0] - log(2)]
    xs, ys = zip(*(half if len(half) >= FEWEST_POINTS else points[-FEWEST_POINTS:]), strict=True)
    return linear_regression(xs, ys).slope if xs[0] < xs[-1] else None


def first_reach(curve: Curve, loss: float) -> float | None:
    """Return the tokens at which a curve first reaches `loss`, by linear interpolation; None if it never does."""
    before: tuple[int, float] | None = None
    for tokens, value in curve:
        if value <= loss:
            if before is None:
                return float(tokens)
            return before[0] + (tokens - before[0]) * ((before[1] - loss) / (before[1] - value))
        before = tokens, value
    return None


def _interval(savings: Summary) -> tuple[float | None, float | None]:
    """Return Student's 95% interval; (None, None) without noise, as for paired differences."""
    return interval(savings) if savings.sd is not None and savings.sd > ROUNDING else (None, None)


def _tokens(curve: Curve) -> int:
    return curve[-1][0] if curve else 0
