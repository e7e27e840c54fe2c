"""Bootstrap over validation documents: how much a difference could change on other documents.

Student's interval covers variation over seeds on the same documents. The bootstrap interval covers variation over
documents for the same seeds. Neither covers both sources of noise.

Reference: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), chapters 6 and 13.
Shapes: C comparisons, T documents, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from simbal.runs.curves import DocumentSums

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0  # fixed, so that the same runs always give the same table


@dataclass(frozen=True)
class OverDocuments:
    """The distribution of a difference of losses over resamples of the documents, in nats per token."""

    error: float  # standard error
    low: float  # lower end of the 95% percentile interval
    high: float
    documents: int


@dataclass(frozen=True)
class DocumentDifferences:
    """Treatment minus baseline for each document with tokens, averaged over seeds."""

    nats: list[float]
    tokens: tuple[int, ...]


def document_differences(
    treatment: Sequence[DocumentSums | None], baseline: Sequence[DocumentSums | None]
) -> DocumentDifferences | None:
    """Return the difference for each document; None unless all runs have the same two or more documents.

    Args:
        treatment: the sums of one run per seed.
        baseline: the sums of runs with the same seeds, in the same order.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(treatment, baseline, strict=True) if ours and theirs]
    splits = {tuple(sums.tokens) for pair in pairs for sums in pair}
    if len(pairs) < len(treatment) or len(splits) != 1:
        return None
    (tokens,) = splits
    used = [index for index, count in enumerate(tokens) if count]
    nats = [sum(ours.nats[index] - theirs.nats[index] for ours, theirs in pairs) / len(pairs) for index in used]
    return DocumentDifferences(nats, tuple(tokens[index] for index in used)) if len(used) > 1 else None


def bootstrap(found: Sequence[DocumentDifferences]) -> list[OverDocuments]:
    """Resample the documents and return the spread of sum(nats) / sum(tokens) for each comparison.

    Every seed and both arms of a comparison use the same documents, so one resample serves all comparisons. Their token
    counts must be equal.
    """
    import numpy as np

    (tokens,) = {one.tokens for one in found}
    nats_TC, tokens_T = np.array([one.nats for one in found]).T, np.array(tokens, dtype=np.float64)
    generator, count = np.random.Generator(np.random.PCG64(SEED)), len(tokens)
    means_RC = np.empty((RESAMPLES, len(found)))
    for resample in range(RESAMPLES):
        times_T = np.bincount(generator.integers(0, count, count), minlength=count).astype(np.float64)
        means_RC[resample] = times_T @ nats_TC / (times_T @ tokens_T)
    half = (1 - CONFIDENCE) / 2
    lows_C, highs_C = np.quantile(means_RC, (half, 1 - half), axis=0)
    spread_C = zip(means_RC.std(axis=0, ddof=1).tolist(), lows_C.tolist(), highs_C.tolist(), strict=True)
    return [OverDocuments(error, low, high, count) for error, low, high in spread_C]
