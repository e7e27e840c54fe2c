"""The uncertainty of a difference over documents: how far it might be on other documents of the same source.

Student's interval is over seeds, on the documents that there are; this one is over documents, for the seeds that there
are. Neither contains the other.

Reference: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), chapters 6 and 13.
Shapes: C comparisons, T documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from simbal.runs.curves import DocumentSums

RESAMPLES = 10_000
AT_ONCE = 256  # comparisons, whose resamples take 80 kB each
CONFIDENCE = 0.95
SEED = 0  # one generator for all, so that a table is the same whenever it is made


@dataclass(frozen=True)
class OverDocuments:
    """A difference of losses over resamples of the documents, in nats per token."""

    error: float  # standard error
    low: float  # lower end of the 95% percentile interval
    high: float
    documents: int


@dataclass(frozen=True)
class DocumentDifferences:
    """Treatment minus baseline of each document with tokens, mean over the seeds."""

    nats: list[float]
    tokens: tuple[int, ...]


def document_differences(
    treatment: Sequence[DocumentSums | None], baseline: Sequence[DocumentSums | None]
) -> DocumentDifferences | None:
    """Return the differences by document; None unless all runs have the same documents, two or more.

    Args:
        treatment: a run for each seed.
        baseline: runs of the same seeds.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(treatment, baseline, strict=True) if ours and theirs]
    splits = {tuple(sums.tokens) for pair in pairs for sums in pair}
    if not pairs or len(pairs) < len(treatment) or len(splits) > 1:
        return None
    (tokens,) = splits
    seen = [place for place, count in enumerate(tokens) if count]
    nats = [sum(ours.nats[place] - theirs.nats[place] for ours, theirs in pairs) / len(pairs) for place in seen]
    return DocumentDifferences(nats, tuple(tokens[place] for place in seen)) if len(seen) > 1 else None


def bootstrap(found: Sequence[DocumentDifferences]) -> list[OverDocuments]:
    """Return the spread of sum nats / sum tokens over resamples of the documents, the same for all comparisons.

    All seeds and both arms of a comparison are on the same documents, so a resample is of documents for all of them.
    The tokens are equal in all comparisons.
    """
    blocks = [found[start : start + AT_ONCE] for start in range(0, len(found), AT_ONCE)]
    return [spread for block in blocks for spread in _spreads(block)]


def _spreads(found: Sequence[DocumentDifferences]) -> list[OverDocuments]:
    import numpy as np

    (tokens,) = {one.tokens for one in found}
    nats_TC = np.array([one.nats for one in found]).T
    drawn_RC = _resampled(nats_TC, np.array(tokens, dtype=np.float64))
    half = (1 - CONFIDENCE) / 2
    lows_C, highs_C = np.quantile(drawn_RC, (half, 1 - half), axis=0)
    errors_C = drawn_RC.std(axis=0, ddof=1)
    numbers = zip(errors_C.tolist(), lows_C.tolist(), highs_C.tolist(), strict=True)
    return [OverDocuments(error, low, high, len(tokens)) for error, low, high in numbers]


def _resampled(nats_TC: NDArray[np.float64], tokens_T: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sum nats / sum tokens of each resample and comparison."""
    import numpy as np

    generator, count = np.random.Generator(np.random.PCG64(SEED)), len(tokens_T)
    drawn = np.empty((RESAMPLES, nats_TC.shape[1]))
    for resample in range(RESAMPLES):
        times_T = np.bincount(generator.integers(0, count, count), minlength=count).astype(np.float64)
        drawn[resample] = times_T @ nats_TC / (times_T @ tokens_T)
    return drawn
