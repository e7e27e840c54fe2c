"""Counts how much of validation also occurs in train: whole documents, and windows of a few tokens.

Validation is held in memory, 13 bytes a token; train is streamed past it.

Shapes: N windows of a chunk, M of validation, T tokens of a chunk, V ids.
"""

import mmap
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.data.splits import DIGEST

WINDOW = 13  # tokens; too long for a common phrase, as in GPT-3's search for test items (arXiv:2005.14165, appendix C)
CHUNK = 1 << 15  # tokens hashed at once: the arrays stay in a core's cache


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
            f"{share:.1%} of its {WINDOW}-token windows also occur in train"
        )


def shared_documents(train_digests: Path, validation_digests: Path) -> int:
    """Return how many validation documents train has too; the files hold the sha256 of each document, back to back.

    Eight bytes of a digest decide: n train documents make one of validation a false match with probability n / 2^64.
    """
    size = validation_digests.stat().st_size // DIGEST
    held_out = _Sought(_document_keys(validation_digests), size)
    for keys_N in _document_keys(train_digests):
        held_out.find(keys_N)
    return held_out.num_found


def _document_keys(digests: Path) -> Iterator[NDArray[np.uint64]]:
    with digests.open("rb") as file:
        while content := file.read(DIGEST * CHUNK):
            yield np.frombuffer(content, "<u8")[:: DIGEST // 8]  # the first 8 bytes of each


def shared_windows(
    train_tokens: NDArray[Any], validation_tokens: NDArray[Any], eot: int, width: int = WINDOW, threads: int = 1
) -> tuple[int, int]:
    """Return how many windows of `width` validation tokens occur in train, and how many windows validation has.

    A window that holds `eot`, which ends every document, is no piece of one document's text: it counts in neither.
    Hashes of 64 bits decide: n train tokens make a window of validation a false match with probability n / 2^64 (2^59
    against windows of the same tokens in another order), which for 20 billion tokens adds 1e-9 to the share.
    """
    hashes = _WindowHashes(int(validation_tokens.max(initial=0)), width)
    whole = (hashes.of(ids_T)[_without(eot, ids_T, width)] for ids_T in _chunks(validation_tokens, width))
    held_out = _Sought(whole, len(validation_tokens))

    def find(part: int) -> None:
        for ids_T in _chunks(train_tokens, width, part, threads):
            held_out.find(hashes.of(ids_T))  # those with eot match nothing

    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(find, range(threads)), maxlen=0)  # raises what a thread raised
    return held_out.num_found, len(held_out.keys_M)


def _chunks(tokens: NDArray[Any], width: int, part: int = 0, parts: int = 1) -> Iterator[NDArray[Any]]:
    """Yield the tokens of CHUNK windows at a time; with several parts, every `parts`-th chunk from `part` on.

    The pages of a memory map are handed back on the way: else a process would seem to need as much memory as the file.
    """
    mapped = tokens.base if isinstance(tokens.base, mmap.mmap) and not tokens.flags.writeable else None
    for start in range(part * CHUNK, len(tokens) - width + 1, parts * CHUNK):
        yield tokens[start : start + CHUNK + width - 1]
        if mapped and start // CHUNK % 128 == 127:
            mapped.madvise(mmap.MADV_DONTNEED)


def _without(eot: int, ids_T: NDArray[Any], width: int) -> NDArray[np.bool_]:
    """Return which windows hold no `eot`, (N,)."""
    ends_before: NDArray[np.int64] = np.concatenate([[0], np.cumsum(ids_T == eot)])
    whole_N: NDArray[np.bool_] = ends_before[width:] == ends_before[:-width]
    return whole_N


class _WindowHashes:
    """Hashes h = sum_i mix[id_i] * BASE^(width - 1 - i) modulo 2^64, for all windows of a chunk at once.

    Each id has 64 random bits of its own in `mix`, so that the hashes of neighbouring ids have nothing in common.
    """

    BASE = 0x9E3779B97F4A7C15  # odd, so that no factor of 2 is lost

    def __init__(self, largest: int, width: int) -> None:
        """Draw `mix` up to validation's `largest` id; ids above share one more entry, as no window of it holds them."""
        self.width = width
        self._mix_V = np.random.default_rng(0).integers(1 << 64, size=largest + 2, dtype=np.uint64)

    def of(self, ids_T: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the hash of the window that starts at each token but the last `width` - 1, (N,)."""
        power_T, size = np.take(self._mix_V, ids_T, mode="clip"), 1  # of the windows of 1, 2, 4, 8 tokens
        hash_T, length = (power_T, 1) if self.width % 2 else (np.zeros(len(ids_T), np.uint64), 0)
        while length < self.width:
            power_T = self._joined(power_T, size, power_T, size)
            size *= 2
            if self.width & size:
                hash_T = self._joined(hash_T, length, power_T, size)
                length += size
        return hash_T

    def _joined(
        self, left_T: NDArray[np.uint64], length: int, right_T: NDArray[np.uint64], size: int
    ) -> NDArray[np.uint64]:
        """Return the hashes of windows of `length` + `size` tokens, from those of their two parts."""
        count = len(right_T) - length
        joined_T = left_T[:count] * np.uint64(pow(self.BASE, size, 1 << 64))
        joined_T += right_T[length:]
        return joined_T


class _Sought:
    """A set of keys, evenly spread over 64 bits, that notes which of them `find` is shown."""

    def __init__(self, keys: Iterable[NDArray[np.uint64]], size: int) -> None:
        """Sort the keys and build the filter; `size` is the largest number of keys that can come."""
        room, count = np.empty(size, np.uint64), 0
        for part_N in keys:
            room[count : count + len(part_N)] = part_N
            count += len(part_N)
        self.keys_M = room[:count]
        self.keys_M.sort()
        self._found_M = np.zeros(count, np.bool_)
        bits = max(3, (16 * count).bit_length())  # of the filter, 16 to 32 for a key: so few others pass
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << (bits - 3), np.uint8)
        for start in range(0, count, CHUNK):
            slots_N = self.keys_M[start : start + CHUNK] >> self._shift
            np.bitwise_or.at(self._filter, slots_N >> 3, np.left_shift(1, slots_N & 7).astype(np.uint8))

    def find(self, keys_N: NDArray[np.uint64]) -> None:
        """Look for `keys_N` among the keys; several threads may at once, as all they write is True."""
        slots_N = keys_N >> self._shift
        bytes_N = np.take(self._filter, slots_N >> 3, mode="clip")
        likely_N = keys_N[(bytes_N >> (slots_N & 7).astype(np.uint8) & 1).view(np.bool_)]
        likely_N.sort()  # five times faster than a search in random order
        places_N = np.searchsorted(self.keys_M, likely_N)
        places_N = places_N[np.take(self.keys_M, places_N, mode="clip") == likely_N]
        self._found_M[places_N] = True

    @property
    def num_found(self) -> int:
        """The number of keys that were shown at least once; equal ones count each."""
        first_N = np.flatnonzero(self._found_M)  # searchsorted finds the first of equal keys
        return int((np.searchsorted(self.keys_M, self.keys_M[first_N], "right") - first_N).sum())
