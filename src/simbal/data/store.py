"""A prepared data set on disk, `<cache_dir>/<source>-<key>/`.

    meta.json            what it contains and where it came from, with the sha256 of all other files; written last
    verified.json        the state of the files when each machine last hashed them
    byte_len.bin         <u2: bytes of text of each id, 0 for end of text
    train/, validation/  tokens.bin: ids, <u2 or <u4, with end of text after every document
                         docs.idx: <u8, the end of each document in tokens

No torch here: the parent process of a sweep prepares the data.
"""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.data.overlap import WINDOW
from simbal.data.sources import SPLITS
from simbal.errors import UserError
from simbal.runs.record import verify_checksum

CHUNK = 1 << 24  # tokens counted at a time
META, VERIFIED = "meta.json", "verified.json"
FILES = ("byte_len.bin", *(f"{split}/{file}" for split in SPLITS for file in ("tokens.bin", "docs.idx")))


@dataclass(frozen=True)
class Store:
    """A prepared data set; its arrays are memory-mapped and read-only."""

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: Path, rehash: bool = False, remember: bool = True) -> "Store":
        """Return the store in `path` after comparing each file with its sha256.

        Args:
            path: the folder of the store.
            rehash: hash the files even if this machine has hashed them since their last change.
            remember: record in the folder that this machine has hashed them.

        Raises:
            UserError: a file is missing or damaged.
        """
        file = path / META
        try:
            meta = verify_checksum(file.read_bytes())
            if rehash or read_verified(path).get(socket.gethostname()) != _file_states(path):
                for name, expected in meta["files"].items():
                    file = path / name
                    if hash_file(file) != expected:
                        raise ValueError("its sha256 does not match")
                if remember:
                    write_verified(path)
        except PermissionError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is damaged ({error}): delete {path} and prepare the data again") from None
        return cls(path, meta)

    @property
    def fingerprints(self) -> dict[str, str]:
        """The sha256 of the `text` and of the `tokens`, 64 hex digits each."""
        return dict(self.meta["fingerprints"])

    @property
    def byte_len(self) -> NDArray[np.uint16]:
        """Bytes of text of each id, (V,)."""
        return np.memmap(self.path / "byte_len.bin", "<u2", "r")

    def tokens(self, split: str) -> NDArray[Any]:
        """Return all ids of a split, (tokens,); uint16, or uint32 for a vocabulary above 65536."""
        return read_array(self.path / split / "tokens.bin", self.meta["dtype"])

    def token_counts(self) -> NDArray[np.int64]:
        """Return the number of training tokens of each id, (V,)."""
        ids, size = self.tokens("train"), len(self.byte_len)
        parts = (np.bincount(ids[first : first + CHUNK], minlength=size) for first in range(0, len(ids), CHUNK))
        return sum(parts, np.zeros(size, np.int64))

    def document_ends(self, split: str) -> NDArray[np.uint64]:
        """Return the position after each document's end of text, (documents,), increasing."""
        return read_array(self.path / split / "docs.idx", "<u8")

    def summary(self) -> str:
        """Return the folder, sizes, overlap of the splits and fingerprints as lines."""
        lines = [str(self.path)]
        for split, counts in self.meta["splits"].items():
            sizes = f"{counts['documents']:,} documents, {counts['tokens']:,} tokens"
            lines.append(f"  {split}: {sizes}, {counts['bytes'] / counts['tokens']:.3f} bytes per token")
        if overlap := self.meta["validation_overlap"]:
            fraction = overlap["windows"] / max(overlap["validation_windows"], 1)
            lines.append(
                f"  validation overlap: {overlap['documents']:,} of {overlap['validation_documents']:,} documents, "
                f"{fraction:.1%} of {overlap['validation_windows']:,} {WINDOW}-token windows also occur in train"
            )
        if self.meta["ends_held_out"]:
            lines.append(f"  {self.describe_held_out_ends()}")
        if skipped := ", ".join(f"{count:,} {reason}" for reason, count in self.meta["skipped"].items()):
            lines.append(f"  skipped or changed: {skipped}")
        lines += [f"  {kind} fingerprint {digest[:12]}" for kind, digest in self.fingerprints.items()]
        return "\n".join(lines)

    def describe_held_out_ends(self) -> str:
        """Return a sentence that explains that validation uses the ends of documents."""
        last = f"the last {100 / self.meta['source']['validation_one_in']:.2g}% of each (data.validation_one_in)"
        return f"too few documents to hold out whole ones: validation uses {last}"


def find(cache_dir: Path, tokens: str, remember: bool = True) -> Store | None:
    """Return the store in `cache_dir` whose tokens have the fingerprint `tokens`, or None.

    Raises:
        UserError: the only such store is damaged.
    """
    damage = None
    for file in sorted(cache_dir.glob(f"*/{META}")):
        try:
            if verify_checksum(file.read_bytes())["fingerprints"]["tokens"] == tokens:
                return Store.open(file.parent, remember=remember)
        except UserError as error:
            damage = damage or error
        except (OSError, ValueError, KeyError):
            continue  # not a store
    if damage:
        raise damage
    return None


def token_dtype(vocab_size: int) -> str:
    """Return the smaller type on disk that holds every id: `<u2` or `<u4`."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def read_array(file: Path, dtype: str) -> NDArray[Any]:
    """Return a file's content as a read-only memory-mapped array."""
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)


def hash_file(file: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def read_verified(folder: Path) -> dict[str, Any]:
    """Return the state of the files by the machine that hashed them."""
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / VERIFIED).read_bytes()))
    return {}


def write_verified(folder: Path) -> None:
    """Record that this machine has hashed the files; in a read-only folder they are hashed each time."""
    with suppress(OSError):
        states = read_verified(folder) | {socket.gethostname(): _file_states(folder)}
        (folder / VERIFIED).write_text(json.dumps(states))


def _file_states(folder: Path) -> list[list[int]]:
    """Return size, times of change and inode of each file, which differ after any change or copy."""
    states = [(folder / name).stat() for name in FILES]
    return [[state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino] for state in states]
