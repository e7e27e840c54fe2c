"""Overlap between training and validation: shared windows and documents equal simple reference counts."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simbal.data import overlap
from simbal.data.overlap import shared_documents, shared_windows

EOT = 2
DOCUMENTS = {
    split: st.lists(st.lists(st.sampled_from(ids)), max_size=6) for split, ids in (("a", [0, 1]), ("b", [0, 1, 3]))
}
NUMBERS = st.lists(st.integers(0, 9), max_size=20)


def tokens_of(documents, dtype=np.uint16):
    return np.array([token for document in documents for token in [*document, EOT]], dtype)


def split_into_windows(documents, width):
    return [tuple(document[i : i + width]) for document in documents for i in range(len(document) - width + 1)]


def write_digests(path, numbers):
    path.write_bytes(b"".join(sha256(bytes([number])).digest() for number in numbers))
    return path


@given(
    train=DOCUMENTS["a"] | DOCUMENTS["b"],
    validation=DOCUMENTS["a"] | DOCUMENTS["b"],
    width=st.integers(1, 14),
    chunk=st.integers(1, 20),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    threads=st.integers(1, 3),
)
@example(train=[], validation=[], width=13, chunk=3, dtype=np.uint16, threads=2)
@example(train=[[0, 1] * 20], validation=[[0, 1] * 9, [1] * 20], width=13, chunk=5, dtype=np.uint16, threads=2)
def test_shared_windows_equal_a_set_of_tuples(train, validation, width, chunk, dtype, threads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "CHUNK", chunk)
        counted = shared_windows(tokens_of(train, dtype), tokens_of(validation, dtype), EOT, width, threads)
    known = set(split_into_windows(train, width))
    validation_batches = split_into_windows(validation, width)
    assert counted == (sum(window in known for window in validation_batches), len(validation_batches))


def test_a_window_is_thirteen_tokens_of_one_document():
    train = tokens_of([[0, 1] * 10])
    assert shared_windows(train, tokens_of([[0, 1] * 6, [0, 1] * 6]), EOT) == (0, 0)
    assert shared_windows(train, tokens_of([[0, 1] * 6 + [0]]), EOT) == (1, 1)


def test_ids_of_65535_and_above_are_distinguished():
    for ids in ([65_535] * 13, [65_536] * 13):
        window = np.array(ids, np.uint32)
        assert shared_windows(window + 1, window, 100_257) == (0, 1)
        assert shared_windows(window, window, 100_257) == (1, 1)
    assert shared_windows(np.full(13, 65_534, np.uint16), np.full(13, 65_535, np.uint16), EOT) == (0, 1)


@given(train=NUMBERS, validation=NUMBERS)
def test_shared_documents_are_counted_as_often_as_validation_has_them(tmp_path_factory, train, validation):
    folder = tmp_path_factory.mktemp("digests")
    files = write_digests(folder / "train", train), write_digests(folder / "validation", validation)
    assert shared_documents(*files) == sum(number in train for number in validation)
