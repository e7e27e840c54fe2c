"""The growing files of one split: everything after the last finished unit can be cut off again."""

import os
from contextlib import ExitStack
from hashlib import file_digest
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

DIGEST = 32  # bytes of a document's sha256
END = 8  # bytes of a document's end in docs.idx


def token_dtype(vocab_size: int) -> str:
    """The narrowest of the two types on disk that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class SplitWriter:
    """Appends documents to `tokens.bin`, `docs.idx` and, for the text's fingerprint, `digests.bin`."""

    def __init__(self, folder: Path, vocab_size: int, documents: int, tokens: int, stack: ExitStack) -> None:
        """Go on after the first `documents` and `tokens` of what an earlier build left."""
        folder.mkdir(exist_ok=True)
        self.folder, self.documents, self.end = folder, documents, tokens
        self._dtype = np.dtype(token_dtype(vocab_size))

        def go_on(name: str, size: int) -> BinaryIO:
            file = stack.enter_context((folder / name).open("ab"))
            file.truncate(size)
            return file

        self._tokens = go_on("tokens.bin", tokens * self._dtype.itemsize)
        self._ends = go_on("docs.idx", documents * END)
        self._digests = go_on("digests.bin", documents * DIGEST)

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
