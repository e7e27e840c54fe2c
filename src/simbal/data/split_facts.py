"""What one split's folder holds, counted from its files and from nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # tokens read at once: with their counts 10 MB, whatever the length of the file


@dataclass(frozen=True)
class SplitFacts:
    """Of `tokens.bin` and `docs.idx`."""

    documents: int
    tokens: int
    bytes: int  # of text: the sum of `byte_len` over all tokens
    sha256: str  # of tokens.bin, in hex
    distinct_ids: int


def facts_of(folder: Path, dtype: str, byte_len: NDArray[np.uint16]) -> SplitFacts:
    """Read `folder/tokens.bin`, ids of type `dtype`, once.

    Raises:
        ValueError: if an id has no entry in `byte_len`, that is none in the vocabulary.
    """
    path = folder / "tokens.bin"
    vocab_size = len(byte_len)
    digest, tokens_per_id_V, tokens = sha256(), np.zeros(vocab_size, np.int64), 0
    for ids in token_chunks(path, dtype):
        if (largest := int(ids.max())) >= vocab_size:  # before bincount, which would make an entry for each id below
            position = tokens + int(ids.argmax())
            raise ValueError(f"{path}: token {position} is {largest}, outside of the vocabulary of {vocab_size} ids")
        digest.update(ids.data)
        tokens_per_id_V += np.bincount(ids, minlength=vocab_size)
        tokens += len(ids)
    return SplitFacts(
        documents=(folder / "docs.idx").stat().st_size // 8,
        tokens=tokens,
        bytes=int(tokens_per_id_V @ byte_len.astype(np.int64)),
        sha256=digest.hexdigest(),
        distinct_ids=int(np.count_nonzero(tokens_per_id_V)),
    )


def token_chunks(path: Path, dtype: str) -> Iterator[NDArray[Any]]:
    """All ids of a `tokens.bin`, up to CHUNK at a time; read and not mapped, so that they leave memory again."""
    with path.open("rb") as file:
        while len(ids := np.fromfile(file, dtype, CHUNK)):
            yield ids
