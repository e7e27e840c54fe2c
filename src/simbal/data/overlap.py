"""Counts how much of validation also occurs in train: whole documents, and windows of 13 tokens.

Shapes: N windows of a chunk, M of validation, T tokens of a chunk, V ids.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 13  # tokens; too long for a common phrase, as in GPT-3's search for test items (arXiv:2005.14165, appendix C)
CHUNK = 1 << 15  # tokens hashed at once: the arrays stay in a core's cache
SAMPLE = 1 << 22  # validation tokens whose windows are looked for, the first ones: 80 MB of memory
BASE = 0x9E3779B97F4A7C15  # odd, so that no factor of 2 is lost


@dataclass(frozen=True)
class Overlap:
    """Counts of validation's documents and windows, repetitions included, and of those that train has too."""

    documents: int
    validation_documents: int
    windows: int
    validation_windows: int

    def __str__(self) -> str:
        share = self.windows / max(self.validation_windows, 1)
        return (
            f"validation overlap: {self.documents:,} of {self.validation_documents:,} documents, "
            f"{share:.1%} of {self.validation_windows:,} {WINDOW}-token windows also occur in train"
        )


def shared_documents(train_digests: Path, validation_digests: Path) -> int:
    """Return how many validation documents train has too; the files hold the sha256 of each document, back to back."""
    held_out = Counter(_digests(validation_digests))
    return sum(held_out.pop(digest, 0) for digest in _digests(train_digests))


def _digests(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while digest := opened.read(32):
            yield digest


def shared_windows(
    train_tokens: NDArray[Any], validation_tokens: NDArray[Any], eot: int, width: int = WINDOW, threads: int = 1
) -> tuple[int, int]:
    """Return how many windows of `width` validation tokens occur in train, and how many windows validation has.

    A window that holds `eot`, which ends every document, is no piece of one document's text: it counts in neither.
    Hashes of 64 bits decide: n train tokens make a window of validation a false match with probability n / 2^64.
    """
    validation_tokens = validation_tokens[:SAMPLE]
    # 64 random bits for each id up to validation's largest; larger ids share an entry, as no window of it holds them
    mix_V = np.random.default_rng(0).integers(1 << 64, size=int(validation_tokens.max(initial=0)) + 2, dtype=np.uint64)
    hashes_N, first_M = _hashes(validation_tokens, mix_V, width), _without(eot, validation_tokens, width)
    keys_M, counts_M = np.unique(hashes_N[first_M], return_counts=True)
    shift = np.uint64(64 - max(4 * len(keys_M), 2).bit_length())
    is_likely = np.zeros(1 << (64 - int(shift)), np.bool_)  # a filter: a search in random order takes 100 ns
    is_likely[keys_M >> shift] = True
    found_M = np.zeros(len(keys_M), np.bool_)

    def find(part: int) -> None:
        for start in range(part * CHUNK, len(train_tokens) - width + 1, threads * CHUNK):
            hashes_N = _hashes(train_tokens[start : start + CHUNK + width - 1], mix_V, width)
            likely_N = np.sort(hashes_N[is_likely[hashes_N >> shift]])
            places_N = np.searchsorted(keys_M, likely_N)
            found_M[places_N[np.take(keys_M, places_N, mode="clip") == likely_N]] = True

    if len(keys_M):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(find, range(threads)))
    return int(counts_M[found_M].sum()), int(counts_M.sum())


def _without(eot: int, ids_T: NDArray[Any], width: int) -> NDArray[np.bool_]:
    """Return which windows hold no `eot`, (N,)."""
    ends_before = np.concatenate([[0], np.cumsum(ids_T == eot)])
    whole_N: NDArray[np.bool_] = ends_before[width:] == ends_before[:-width]
    return whole_N


def _hashes(ids_T: NDArray[Any], mix_V: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Return the hash of each window, (N,): the sum over i of mix[id_i] * BASE^(width - 1 - i), modulo 2^64.

    It is put together from the hashes of windows of 1, 2, 4, 8 tokens.
    """
    power_T, size = np.take(mix_V, ids_T, mode="clip"), 1
    hash_T, length = np.zeros(len(ids_T), np.uint64), 0
    while length < width:
        if width & size:
            hash_T, length = _joined(hash_T, length, power_T, size), length + size
        power_T, size = _joined(power_T, size, power_T, size), 2 * size
    return hash_T


def _joined(left_T: NDArray[np.uint64], length: int, right_T: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Return the hashes of windows of `length` + `size` tokens, from the hashes of their two parts."""
    count = max(0, len(right_T) - length)
    return left_T[:count] * np.uint64(pow(BASE, size, 1 << 64)) + right_T[length:]
