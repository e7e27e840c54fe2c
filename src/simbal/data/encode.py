"""Documents to ids in several threads, in order: the same bytes for any number of them."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simbal.data.document import Document
from simbal.data.sources import Encoder

GROUP = 1 << 20  # bytes of text that a thread encodes at once


class Encoded(NamedTuple):
    """A document and its ids, end of text included."""

    document: Document
    ids: NDArray[np.uint32]
    num_bytes: int  # of text that the ids stand for


def encode_in_threads(documents: Iterable[Document], encoder: Encoder, threads: int | None) -> Iterator[list[Encoded]]:
    """Group after group; `threads` None takes one per core.

    Raises:
        IndexError: an id is not below the vocabulary size, which a narrower type would wrap around without a word.
    """
    eot = np.uint32(encoder.eot)

    def encode(group: list[Document]) -> list[Encoded]:
        encoded = []
        for document in group:
            ids = np.append(encoder.encode(document.content), eot)
            encoded.append(Encoded(document, ids, int(encoder.byte_len[ids].sum())))
        return encoded

    threads = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[list[Encoded]]] = deque()
        for group in _groups(documents):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > 2 * threads:  # the reader is ahead: bounds the memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
