"""Validation losses of n-gram models that count the training tokens: what a language model has to beat.

The models use interpolated absolute discounting: p_n = (max(count - D, 0) + D * kinds * p_{n-1}) / total, where `count`
is the count of the n-gram, `total` and `kinds` are the number of tokens and of different tokens that follow its
context, and p_0 = 1 / V. D is n1 / (n1 + 2 * n2) with the numbers of n-grams that occur once and twice.

Reference: H. Ney, U. Essen and R. Kneser, Computer Speech and Language 8 (1994).
Shapes: W windows, T = sequence length + 1, V vocabulary, G distinct n-grams.
"""

import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.data.loader import TokenData, batch_windows
from simbal.runs.atomic import lock, write_json

ORDERS = 5
MOST_TOKENS = 1 << 25  # of training text; counting more takes minutes and gigabytes
SMALLEST_DISCOUNT = 0.1  # if every n-gram repeats; without a discount a new token would have an infinite loss
UNSEEN = -1


def ngram_losses(data: TokenData, vocab_size: int) -> dict[str, Any]:
    """Return the losses of unigram, bigram, ... models on the validation split, from the cache in the store's folder.

    The models count as many training windows as the run reads (in one epoch), but not the run's own selection: all runs
    with the same data and length have the same losses.

    Returns:
        `tokens`: counted tokens; `losses`: nats per token by order, as text for JSON.
    """
    windows_WT, validation = data.train_windows, data.validation
    seq_len = validation.seq_len
    count = min(len(windows_WT), data.windows_read, max(1, MOST_TOKENS // seq_len))
    name = f"{seq_len}-{count}-{validation.document_tokens or 'all'}"
    file = data.store.path / "ngrams" / f"{name}.json"

    def measure() -> dict[str, Any]:
        chosen = np.sort(batch_windows(0, 0, len(windows_WT), count))
        losses = fit_and_score(windows_WT[chosen], validation.windows_WT[validation.included], vocab_size)
        return {"tokens": count * seq_len, "losses": {str(order): loss for order, loss in losses.items()}}

    if not file.exists():
        try:
            file.parent.mkdir(exist_ok=True)
            with lock(file.with_name(f".{name}.lock"), timeout=-1):
                if not file.exists():
                    started = time.process_time()
                    write_json(file, measure() | {"cpu_seconds": time.process_time() - started})
        except OSError:  # the store is read-only
            return measure()
    result = json.loads(file.read_bytes())
    return {key: result[key] for key in ("tokens", "losses")}


def fit_and_score(train_WT: NDArray[Any], validation_WT: NDArray[Any], vocab_size: int) -> dict[int, float]:
    """Return the mean loss of the validation windows in nats per token by order.

    The first token of a window is never a target, and the context of the others ends at the start of their window.
    """
    train_WT, validation_WT = train_WT.astype(np.int64), validation_WT.astype(np.int64)
    p_WT = np.full(validation_WT.shape, 1 / vocab_size)
    contexts, validation_contexts = np.zeros_like(train_WT), np.zeros_like(validation_WT)  # the empty context
    num_contexts, losses = 1, {}
    for order in range(1, ORDERS + 1):
        first = order - 1  # the first position with a full context
        keys = contexts * vocab_size + train_WT[:, first:]
        grams_G, ids, counts_G = np.unique(keys, return_inverse=True, return_counts=True)
        context_G = grams_G // vocab_size
        totals = np.bincount(context_G, weights=counts_G, minlength=num_contexts)
        kinds = np.bincount(context_G, minlength=num_contexts)
        once, twice = np.count_nonzero(counts_G == 1), np.count_nonzero(counts_G == 2)
        discount = once / (once + 2 * twice) if once else SMALLEST_DISCOUNT

        keys = validation_contexts * vocab_size + validation_WT[:, first:]
        places = np.minimum(np.searchsorted(grams_G, keys), len(grams_G) - 1)
        is_known = grams_G[places] == keys
        counts, total = np.where(is_known, counts_G[places], 0), totals[validation_contexts]
        shorter = p_WT[:, first:]
        interpolated = np.maximum(counts - discount, 0) + discount * kinds[validation_contexts] * shorter
        has_context = (validation_contexts != UNSEEN) & (total > 0)
        p_WT[:, first:] = np.where(has_context, interpolated / np.maximum(total, 1), shorter)
        losses[order] = -float(np.log(p_WT[:, 1:]).mean())

        contexts = ids.reshape(train_WT[:, first:].shape)[:, :-1]
        validation_contexts = np.where(is_known, places, UNSEEN)[:, :-1]
        num_contexts = len(grams_G)
    return losses
