"""The growing files of one split: everything after the last finished unit can be cut off again."""

import os
from contextlib import ExitStack
from hashlib import file_digest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGEST = 32  # bytes of a document's sha256
END = 8  # bytes of a document's end in docs.idx


def token_dtype(vocab_size: int) -> str:
    """The narrowest of the two types on disk that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def sizes(vocab_size: int, documents: int, tokens: int) -> dict[str, int]:
    """Bytes of each file of a split."""
    width = np.dtype(token_dtype(vocab_size)).itemsize
    return {"tokens.bin": tokens * width, "docs.idx": documents * END, "digests.bin": documents * DIGEST}


class SplitWriter:
    """Appends documents to `tokens.bin`, `docs.idx` and, for the text's fingerprint, `digests.bin`."""

    def __init__(self, folder: Path, vocab_size: int, documents: int, tokens: int, stack: ExitStack) -> None:
        """Go on after the first `documents` and `tokens` of what an earlier build left."""
        folder.mkdir(exist_ok=True)
        self.folder, self.documents, self.end = folder, documents, tokens
        self._dtype = np.dtype(token_dtype(vocab_size))

        files = []
        for name, size in sizes(vocab_size, documents, tokens).items():
            files.append(stack.enter_context((folder / name).open("ab")))
            files[-1].truncate(size)
        self._tokens, self._ends, self._digests = files

    def write(self, ids: NDArray[np.uint32], digest: bytes) -> None:
        """One document, its end of text included; its ids must be below the vocabulary size."""
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self.end += len(ids)
        self.documents += 1
        self._ends.write(self.end.to_bytes(END, "little"))
        self._digests.write(digest)

    def sync(self) -> None:
        """On the disk, not only on the way to it."""
        for file in (self._tokens, self._ends, self._digests):
            file.flush()
            os.fsync(file.fileno())

    def text_sha256(self) -> str:
        """Over the digests of all documents, in order."""
        with (self.folder / "digests.bin").open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
