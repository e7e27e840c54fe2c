"""Measures of how well text is predicted, from sums over a whole split."""

import math


def perplexity(nats: float, tokens: int) -> float:
    """Return exp of the mean cross-entropy per token, nats / tokens; `inf` where that overflows."""
    loss = nats / tokens
    return math.exp(loss) if loss < math.log(1e300) else math.inf


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return the cross-entropy in bits per UTF-8 byte of text, which is comparable across vocabularies."""
    return nats / (math.log(2) * num_bytes)
