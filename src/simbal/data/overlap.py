"""Counts how much of the validation split also occurs in the train split: whole documents, and 13-token windows.

Shapes: N windows in a chunk, M distinct validation windows, T tokens in a chunk, V ids of validation.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 13  # tokens; longer than common phrases, as in GPT-3's search for test items (arXiv:2005.14165, appendix C)
CHUNK = 1 << 17  # windows hashed at once; a thread needs about 4 MB
SAMPLE = 1 << 22  # only the windows of the first validation tokens are searched, which takes 280 MB of memory
DIGEST_BYTES = 32
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication modulo 2^64 loses no bits


def shared_documents(train_digests: Path, validation_digests: Path) -> int:
    """Return how many validation documents also occur in train; the files contain the sha256 of each document."""
    validation = Counter(_read_digests(validation_digests))
    return sum(validation.pop(digest, 0) for digest in _read_digests(train_digests))


def _read_digests(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while digest := opened.read(DIGEST_BYTES):
            yield digest


def shared_windows(
    train_tokens: NDArray[Any], validation_tokens: NDArray[Any], eot: int, width: int = WINDOW, threads: int = 1
) -> tuple[int, int]:
    """Return how many windows of `width` validation tokens occur in train, and how many windows there are.

    Windows that contain `eot`, which ends every document, do not count. Windows are compared by 64-bit hashes: n train
    tokens make a window a false match with probability n / 2^64.
    """
    validation_tokens = validation_tokens[:SAMPLE]
    # 64 random bits for each id of validation; all larger ids share an entry, because validation lacks them
    mix_V = np.random.default_rng(0).integers(1 << 64, size=int(validation_tokens.max(initial=0)) + 2, dtype=np.uint64)

    def hash_chunk(tokens: NDArray[Any], start: int) -> NDArray[np.uint64]:
        """Return the hash of each window that starts in a chunk, (N,): the sum over i of mix[id_i] * BASE^i."""
        mixed_T = np.take(mix_V, tokens[start : start + CHUNK + width - 1], mode="clip")
        hash_N = np.zeros(len(mixed_T) - width + 1, np.uint64)
        for position in reversed(range(width)):
            hash_N *= BASE
            hash_N += mixed_T[position : position + len(hash_N)]
        return hash_N

    ends_before = np.concatenate([[0], np.cumsum(validation_tokens == eot)])
    within_document = ends_before[width:] == ends_before[:-width]
    parts = [hash_chunk(validation_tokens, start) for start in _chunk_starts(validation_tokens, width)]
    hashes = np.concatenate([np.empty(0, np.uint64), *parts])
    keys_M, counts_M = np.unique(hashes[within_document], return_counts=True)
    found_M = np.zeros(len(keys_M), np.bool_)

    def find(start: int) -> None:
        hash_N = np.sort(hash_chunk(train_tokens, start))  # a search in sorted order is five times as fast
        positions_N = np.searchsorted(keys_M, hash_N)
        found_M[positions_N[np.take(keys_M, positions_N, mode="clip") == hash_N]] = True

    if len(keys_M):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(find, _chunk_starts(train_tokens, width)))
    return int(counts_M[found_M].sum()), int(counts_M.sum())


def _chunk_starts(tokens: NDArray[Any], width: int) -> range:
    return range(0, len(tokens) - width + 1, CHUNK)
