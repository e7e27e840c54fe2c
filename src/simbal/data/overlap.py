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
    hashes = _WindowHashes(int(validation_tokens.max(initial=0)), width)
    parts = [hashes.of(ids_T)[_without(eot, ids_T, width)] for ids_T in _chunks(validation_tokens, width)]
    keys_M, counts_M = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]), return_counts=True)
    shift = np.uint64(64 - max(16 * len(keys_M), 2).bit_length())
    is_likely = np.zeros(1 << (64 - int(shift)), np.bool_)  # a filter, as a search takes 100 ns
    is_likely[keys_M >> shift] = True
    found_M = np.zeros(len(keys_M), np.bool_)

    def find(part: int) -> None:
        for ids_T in _chunks(train_tokens, width, part, threads):
            hashes_N = hashes.of(ids_T)
            likely_N = hashes_N[np.take(is_likely, (hashes_N >> shift).view(np.int64))]
            likely_N.sort()  # a search in order is five times as fast
            places_N = np.searchsorted(keys_M, likely_N)
            found_M[places_N[np.take(keys_M, places_N, mode="clip") == likely_N]] = True

    if len(keys_M):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(find, range(threads)))
    return int(counts_M[found_M].sum()), int(counts_M.sum())


def _chunks(tokens: NDArray[Any], width: int, part: int = 0, parts: int = 1) -> Iterator[NDArray[Any]]:
    """Yield the tokens of CHUNK windows at a time; with several parts, every `parts`-th chunk from `part` on."""
    for start in range(part * CHUNK, len(tokens) - width + 1, parts * CHUNK):
        yield tokens[start : start + CHUNK + width - 1]


def _without(eot: int, ids_T: NDArray[Any], width: int) -> NDArray[np.bool_]:
    """Return which windows hold no `eot`, (N,)."""
    ends_before = np.concatenate([[0], np.cumsum(ids_T == eot)])
    whole_N: NDArray[np.bool_] = ends_before[width:] == ends_before[:-width]
    return whole_N


class _WindowHashes:
    """Hashes of windows, modulo 2^64: the sum over i of mix[id_i] * BASE^i, i from 0 to width - 1.

    Each id has 64 random bits in `mix`, so that the hashes of neighbouring ids have nothing in common.
    """

    def __init__(self, largest: int, width: int) -> None:
        """Draw `mix` up to validation's `largest` id; larger ids share an entry, as no window of it holds them."""
        self._width, most = width, CHUNK + width
        self._mix_V = np.random.default_rng(0).integers(1 << 64, size=largest + 2, dtype=np.uint64)
        self._powers_T = np.full(most, BASE, np.uint64).cumprod()
        self._inverse_T = np.full(most, pow(BASE, -1, 1 << 64), np.uint64).cumprod()

    def of(self, ids_T: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the hash of the window that starts at each token but the last `width` - 1, (N,).

        It is a difference of sums from the first token on, shifted to the window's start.
        """
        sums_T = np.zeros(len(ids_T) + 1, np.uint64)
        np.cumsum(np.take(self._mix_V, ids_T, mode="clip") * self._powers_T[: len(ids_T)], out=sums_T[1:])
        hash_N: NDArray[np.uint64] = sums_T[self._width :] - sums_T[: -self._width]
        hash_N *= self._inverse_T[: len(hash_N)]
        return hash_N
