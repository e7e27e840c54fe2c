import math

import numpy as np
import pytest

from simbal.data.store import prepare

SYMBOLS, BRANCHING = 31, 4


@pytest.fixture
def chain(keys):
    """`chain(chain_seed=1)`: documents of 500 symbols, one row each, without their end of text."""

    def walk(split="train", **changed):
        documents = {"vocab_size": SYMBOLS + 1, "branching": BRANCHING, "documents": 100, "document_tokens": 500}
        store = prepare(keys("synthetic", **{**documents, **changed}), progress=False)
        return store.tokens(split).reshape(-1, 501)[:, :-1].astype(int)

    return walk


def transitions(symbols):
    counts = np.zeros((SYMBOLS, SYMBOLS))
    np.add.at(counts, (symbols[:, :-1].ravel(), symbols[:, 1:].ravel()), 1)
    return counts


def test_each_symbol_has_as_many_successors_as_asked_and_they_are_the_same_in_both_splits(chain):
    counts = transitions(chain())
    assert set(np.count_nonzero(counts[counts.sum(1) > 100], axis=1)) == {BRANCHING}
    assert not transitions(chain("validation"))[counts == 0].any()


def test_the_entropy_rate_is_the_logarithm_of_the_branching(chain):
    counts = transitions(chain())
    rows = counts / counts.sum(1, keepdims=True)
    nats = -(counts * np.log(rows, where=rows > 0, out=np.zeros_like(rows))).sum() / counts.sum()
    assert nats == pytest.approx(math.log(BRANCHING), abs=2e-3)


def test_a_document_is_a_function_of_the_seed_and_its_number(chain):
    assert np.array_equal(chain(documents=40), chain()[:40])
    assert not np.array_equal(chain(chain_seed=1), chain())


def test_validation_has_documents_of_its_own(chain):
    train, validation = ({row.tobytes() for row in chain(split)} for split in ("train", "validation"))
    assert (len(train), len(validation)) == (100, 2)
    assert not train & validation
