"""Training tokens that an arm needs to become as good as the baseline, seed by seed, and what that saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simbal.report.statistics import interval, summarize

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
