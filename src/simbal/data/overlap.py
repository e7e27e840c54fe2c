"""Counts how much of the validation split also occurs in the train split: whole documents, and 13-token windows.

Shapes: N windows in a chunk, M distinct validation windows, T tokens in a chunk, V ids.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 13  # tokens; longer than common phrases, as in GPT-3's search for test items (arXiv:2005.14165, appendix C)
CHUNK = 1 << 15  # tokens hashed at once, so that the arrays stay in a core's cache
SAMPLE = 1 << 22  # only the windows of the first validation tokens are searched, which takes 80 MB of memory
DIGEST_BYTES = 32
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


@dataclass(frozen=True)
class Overlap:
    """Validation documents and windows, including repetitions, and how many of them also occur in train."""

    documents: int
    validation_documents: int
    windows: int
    validation_windows: int

    def __str__(self) -> str:
        fraction = self.windows / max(self.validation_windows, 1)
        return (
            f"validation overlap: {self.documents:,} of {self.validation_documents:,} documents, "
            f"{fraction:.1%} of {self.validation_windows:,} {WINDOW}-token windows also occur in train"
        )


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
    hashes = _WindowHashes(int(validation_tokens.max(initial=0)), width)
    parts = [hashes.of(ids_T)[_within_document(ids_T, eot, width)] for ids_T in _chunks(validation_tokens, width)]
    keys_M, counts_M = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]), return_counts=True)
    shift = np.uint64(64 - max(16 * len(keys_M), 2).bit_length())
    is_candidate = np.zeros(1 << (64 - int(shift)), np.bool_)  # prefilter: a search takes 100 ns
    is_candidate[keys_M >> shift] = True
    found_M = np.zeros(len(keys_M), np.bool_)

    def find(part: int) -> None:
        for ids_T in _chunks(train_tokens, width, part, threads):
            hashes_N = hashes.of(ids_T)
            candidates_N = hashes_N[np.take(is_candidate, (hashes_N >> shift).view(np.int64))]
            candidates_N.sort()  # a search in sorted order is five times as fast
            positions_N = np.searchsorted(keys_M, candidates_N)
            found_M[positions_N[np.take(keys_M, positions_N, mode="clip") == candidates_N]] = True

    if len(keys_M):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(find, range(threads)))
    return int(counts_M[found_M].sum()), int(counts_M.sum())


def _chunks(tokens: NDArray[Any], width: int, part: int = 0, parts: int = 1) -> Iterator[NDArray[Any]]:
    """Yield the tokens of CHUNK windows at a time; with several parts, every `parts`-th chunk from `part` on."""
    for start in range(part * CHUNK, len(tokens) - width + 1, parts * CHUNK):
        yield tokens[start : start + CHUNK + width - 1]


def _within_document(ids_T: NDArray[Any], eot: int, width: int) -> NDArray[np.bool_]:
    """Return which windows contain no `eot`, (N,)."""
    ends_before = np.concatenate([[0], np.cumsum(ids_T == eot)])
    within_N: NDArray[np.bool_] = ends_before[width:] == ends_before[:-width]
    return within_N


class _WindowHashes:
    """Hashes of windows modulo 2^64: the sum over i of mix[id_i] * BASE^i, with 64 random bits `mix` for each id."""

    def __init__(self, max_id: int, width: int) -> None:
        """Create `mix` up to validation's largest id; larger ids share an entry, because validation lacks them."""
        self._width, size = width, CHUNK + width
        self._mix_V = np.random.default_rng(0).integers(1 << 64, size=max_id + 2, dtype=np.uint64)
        self._powers_T = np.full(size, BASE, np.uint64).cumprod()
        self._inverse_T = np.full(size, pow(BASE, -1, 1 << 64), np.uint64).cumprod()

    def of(self, ids_T: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the hash of the window that starts at each token but the last `width` - 1, (N,).

        It is a difference of cumulative sums, shifted to the start of the window.
        """
        sums_T = np.zeros(len(ids_T) + 1, np.uint64)
        np.cumsum(np.take(self._mix_V, ids_T, mode="clip") * self._powers_T[: len(ids_T)], out=sums_T[1:])
        hash_N: NDArray[np.uint64] = sums_T[self._width :] - sums_T[: -self._width]
        hash_N *= self._inverse_T[: len(hash_N)]
        return hash_N
