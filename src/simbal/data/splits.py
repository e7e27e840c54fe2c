"""The files of one split: their layout, their writer, and the reader that counts them again.

A split is appended to so that all after the last finished unit can be cut off.
Shapes: V vocabulary.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 17  # tokens read at once: with their counts they stay in a core's cache
END = 8  # bytes of a document's end in docs.idx
DIGEST = 32  # bytes of a document's sha256
Hash = Any  # what hashlib.sha256 returns, whose class has no public name


@dataclass(frozen=True)
class SplitFacts:
    """Counts and hashes of a split's `tokens.bin` and `docs.idx`."""

    documents: int
    tokens: int
    bytes: int  # of text: the sum of `byte_len` over all tokens
    sha256: str  # of tokens.bin, in hex
    distinct_ids: int
    ends_sha256: str  # of docs.idx, in hex


class SplitWriter:
    """A writer that appends documents to `tokens.bin`, `docs.idx` and, for the text's fingerprint, `digests.bin`."""

    def __init__(self, folder: Path, vocab_size: int, documents: int, tokens: int, stack: ExitStack) -> None:
        """Go on after the first `documents` and `tokens` of what an earlier build left."""
        folder.mkdir(exist_ok=True)
        self.documents, self.end = documents, tokens
        self._dtype = np.dtype(token_dtype(vocab_size))

        self._files, self._hashes = [], list[Hash]()
        for name, size in sizes(vocab_size, documents, tokens).items():
            self._files.append(stack.enter_context((folder / name).open("ab")))
            self._files[-1].truncate(size)
            self._hashes.append(hash_of(folder / name, size))

    def write(self, ids: NDArray[np.uint32], digest: bytes) -> None:
        """Append one document, its end of text included; its ids must be below the vocabulary size."""
        self.end += len(ids)
        self.documents += 1
        contents = (ids.astype(self._dtype).tobytes(), self.end.to_bytes(END, "little"), digest)
        for file, of_file, content in zip(self._files, self._hashes, contents, strict=True):
            file.write(content)
            of_file.update(content)

    @property
    def sha256(self) -> list[str]:
        """The sha256 of each file so far, in hex."""
        return [of_file.hexdigest() for of_file in self._hashes]

    def sync(self) -> None:
        """Flush the files to the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())


def token_dtype(vocab_size: int) -> str:
    """Return the narrower of the two types on disk that holds every id: `<u2` or `<u4`."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def sizes(vocab_size: int, documents: int, tokens: int) -> dict[str, int]:
    """Return the bytes of each file of a split, by name."""
    width = np.dtype(token_dtype(vocab_size)).itemsize
    return {"tokens.bin": tokens * width, "docs.idx": documents * END, "digests.bin": documents * DIGEST}


def hash_of(file: Path, size: int) -> Hash:
    """Return the sha256 of the first `size` bytes of a file, or of all if it has no more, to go on with."""
    found, view = sha256(), memoryview(bytearray(1 << 20))
    with file.open("rb") as opened:
        while size and (count := opened.readinto(view[: min(size, len(view))])):
            found.update(view[:count])
            size -= count
    return found


def facts_of(folder: Path, dtype: str, byte_len: NDArray[np.uint16], eot: int) -> tuple[SplitFacts, str]:
    """Read both files of a split once.

    Args:
        folder: the split's folder.
        dtype: the type of the ids on disk.
        byte_len: bytes of text that each id of the vocabulary stands for.
        eot: the id after which each document ends.

    Returns:
        The facts, and where docs.idx is not what the ends of text in tokens.bin say; "" if nowhere.

    Raises:
        ValueError: if an id has no entry in `byte_len`, that is none in the vocabulary.
    """
    path = folder / "tokens.bin"
    vocab_size = len(byte_len)
    digest, tokens_per_id_V, tokens = sha256(), np.zeros(vocab_size, np.int64), 0
    with (folder / "docs.idx").open("rb") as file:
        ends = _DocumentEnds(file)
        for ids in token_chunks(path, dtype):
            if (largest := int(ids.max())) >= vocab_size:  # before bincount, which would count each id below
                position = tokens + int(ids.argmax())
                raise ValueError(
                    f"{path}: token {position} is {largest}, outside of the vocabulary of {vocab_size} ids"
                )
            digest.update(ids.data)
            tokens_per_id_V += np.bincount(ids, minlength=vocab_size)
            ends.compare(np.flatnonzero(ids == eot) + (tokens + 1))
            tokens += len(ids)
        fault = ends.finish(tokens)
    facts = SplitFacts(
        documents=ends.documents,
        tokens=tokens,
        bytes=int(tokens_per_id_V @ byte_len.astype(np.int64)),
        sha256=digest.hexdigest(),
        distinct_ids=int(np.count_nonzero(tokens_per_id_V)),
        ends_sha256=ends.digest.hexdigest(),
    )
    return facts, fault


def token_chunks(path: Path, dtype: str) -> Iterator[NDArray[Any]]:
    """Yield all ids of a `tokens.bin`, up to CHUNK at a time; read, not mapped, so that they leave memory again."""
    with path.open("rb") as file:
        while len(ids := np.fromfile(file, dtype, CHUNK)):
            yield ids


class _DocumentEnds:
    """`docs.idx`, read alongside the tokens and compared with them.

    Each document ends after an end of text, and there is no other: so its positions increase, up to the last token.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._path, self._file = Path(file.name), file
        self._found = self._last = 0  # ends of text in tokens.bin, and the last position stated for one
        self._fault = ""
        self.documents, self.digest = 0, sha256()

    def compare(self, found: NDArray[np.int64]) -> None:
        """Compare the next ends of text found in tokens.bin, as positions after them, with docs.idx."""
        stated = self._read(len(found))
        wrong = np.flatnonzero(found[: len(stated)] != stated)
        if len(wrong) and not self._fault:
            first = int(wrong[0])
            self._fault = (
                f"{self._path}: document {self._found + first} ends at {stated[first]}, "
                f"but its end of text at {found[first]}"
            )
        self._found += len(found)

    def finish(self, tokens: int) -> str:
        """Return the first fault, or "" if there is none, after all of the `tokens`."""
        while len(self._read(CHUNK)):
            pass
        of_tokens = self._path.with_name("tokens.bin")
        if not self._fault and self._found != self.documents:
            self._fault = f"{of_tokens}: {self._found} ends of text, but {self.documents} documents in docs.idx"
        if not self._fault and self._last != tokens:
            self._fault = f"{of_tokens}: {tokens - self._last} tokens after the last end of text"
        return self._fault

    def _read(self, count: int) -> NDArray[np.uint64]:
        stated = np.fromfile(self._file, "<u8", count)
        self.digest.update(stated.data)
        self.documents += len(stated)
        self._last = int(stated[-1]) if len(stated) else self._last
        return stated
