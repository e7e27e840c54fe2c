"""Losses of n-gram models equal a loop over the definition, and the cache gives them again."""

from collections import Counter
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.data import ngrams
from simbal.data.loader import TokenData, batch_windows
from simbal.data.ngrams import ORDERS, SMALLEST_DISCOUNT, fit_and_score
from simbal.data.prepare import prepare

VOCAB = 4
windows = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6), min_size=1, max_size=8)


def loss_by_definition(train, validation, order, vocab_size=VOCAB):
    """The mean loss of an n-gram model with interpolated absolute discounting."""
    models = []
    for n in range(1, order + 1):
        grams = Counter(tuple(window[i - n + 1 : i + 1]) for window in train for i in range(n - 1, len(window)))
        once, twice = (sum(count == k for count in grams.values()) for k in (1, 2))
        models.append((grams, once / (once + 2 * twice) if once else SMALLEST_DISCOUNT))

    def probability(context, token):
        if context is None:
            return 1 / vocab_size
        shorter = probability(context[1:] if context else None, token)
        grams, discount = models[len(context)]
        following = {gram[-1]: count for gram, count in grams.items() if gram[:-1] == context}
        if not following:
            return shorter
        left = discount * len(following) * shorter
        return (max(following.get(token, 0) - discount, 0) + left) / sum(following.values())

    logs = [
        log(probability(tuple(window[max(0, i - order + 1) : i]), window[i]))
        for window in validation
        for i in range(1, len(window))
    ]
    return -sum(logs) / len(logs)


@given(windows, windows)
def test_losses_equal_the_definition(train, validation):
    expected = {order: loss_by_definition(train, validation, order) for order in range(1, ORDERS + 1)}
    found = fit_and_score(np.array(train), np.array(validation), VOCAB)
    assert found == pytest.approx(expected)


@pytest.fixture
def data(keys):
    chain = {"documents": 16, "document_tokens": 512, "validation_one_in": 8, "vocab_size": 64}
    sizes = {"seq_len": 64, "global_batch": 8, "micro_batch": 4, "max_steps": 4}
    return TokenData(prepare(keys("synthetic", **chain), progress=False), seed=3, **sizes, validation_tokens=None)


def test_losses_of_a_run_are_fitted_on_as_many_training_windows_as_it_reads_and_cached(data, monkeypatch):
    train = data.train_windows[batch_windows(0, 0, len(data.train_windows), 32)].tolist()
    validation = data.validation.windows_WT[data.validation.included].tolist()
    found = ngrams.ngram_losses(data, 64)
    assert found["tokens"] == 32 * 64
    for order in (1, 2):
        assert found["losses"][str(order)] == pytest.approx(loss_by_definition(train, validation, order, 64))
    monkeypatch.setattr(ngrams, "fit_and_score", None)
    assert ngrams.ngram_losses(data, 64) == found


def test_losses_of_a_store_that_cannot_be_written_are_measured_each_time(data, monkeypatch):
    def refuse(*_):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(ngrams, "write_json", refuse)
        measured = ngrams.ngram_losses(data, 64)
    assert not [*(data.store.path / "ngrams").glob("*.json")]
    assert measured == ngrams.ngram_losses(data, 64)


def test_a_repeated_text_is_predicted_by_longer_contexts():
    text = np.tile([0, 1, 2, 0, 2, 1], 50)[:300].reshape(10, 30)
    losses = fit_and_score(text, text, VOCAB)
    assert losses[1] == pytest.approx(np.log(3), abs=0.02)
    assert losses[2] == pytest.approx(np.log(2), abs=0.02)
    assert losses[3] < 0.05
