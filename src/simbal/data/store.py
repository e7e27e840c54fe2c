"""Tokens on disk: `<cache_dir>/<source>-<key>/`, complete or absent, never half-written.

    meta.json                 what it holds and where it came from; written last
    byte_len.bin              <u2: bytes of text that each id stands for, 0 for end of text
    train/, validation/       tokens.bin: ids, <u2 or <u4, end of text after every document
                              docs.idx: <u8, the end of each document in tokens

No torch here: the sweep's parent process prepares the data of its runs.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.data.builder import FORMAT, build
from simbal.data.document import SPLITS
from simbal.data.sources import Source, open_encoder, open_source
from simbal.errors import UserError


@dataclass(frozen=True)
class Store:
    """A prepared data set; arrays are memory-mapped and read-only."""

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Read `meta.json` and check every file's size against it.

        Raises:
            UserError: if the folder was damaged after it was written.
        """
        try:
            store = cls(path, json.loads((path / "meta.json").read_text(encoding="utf-8")))
            sizes = {path / "byte_len.bin": 2 * store.meta["vocab_size"]}
            for split in SPLITS:
                counts = store.meta["splits"][split]
                sizes[path / split / "tokens.bin"] = counts["tokens"] * np.dtype(store.meta["dtype"]).itemsize
                sizes[path / split / "docs.idx"] = 8 * counts["documents"]
            wrong = [file for file, size in sizes.items() if file.stat().st_size != size]
        except (OSError, ValueError, KeyError, TypeError):
            wrong = [path / "meta.json"]
        if wrong:
            raise UserError(f"{wrong[0]} is damaged: delete {path} and prepare it again")
        return store

    @property
    def fingerprints(self) -> dict[str, str]:
        """sha256 of the `text` and of the `tokens`, 64 hex digits each."""
        return dict(self.meta["fingerprints"])

    @property
    def byte_len(self) -> NDArray[np.uint16]:
        """(V,) bytes of text that each id stands for."""
        return np.memmap(self.path / "byte_len.bin", "<u2", "r")

    def tokens(self, split: str) -> NDArray[Any]:
        """(tokens,) all ids of a split; uint16, or uint32 for a vocabulary above 65536."""
        return np.memmap(self.path / split / "tokens.bin", self.meta["dtype"], "r")

    def document_ends(self, split: str) -> NDArray[np.uint64]:
        """(documents,) position after each document's end of text, increasing."""
        return np.memmap(self.path / split / "docs.idx", "<u8", "r")

    def summary(self) -> str:
        """Folder, sizes and fingerprints, for people."""
        lines = [f"{self.path}"]
        for split, counts in self.meta["splits"].items():
            per_token = counts["bytes"] / counts["tokens"]
            lines.append(
                f"  {split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
                f"{per_token:.3f} bytes per token"
            )
        left_out = {**self.meta["skipped"], "with surrogates replaced": self.meta["surrogates_replaced"]}
        lines += [f"  {reason}: {count:,}" for reason, count in left_out.items() if count]
        lines += [f"  {kind} fingerprint {digest[:12]}" for kind, digest in self.fingerprints.items()]
        return "\n".join(lines)


def prepare(data: dict[str, Any], progress: bool) -> Store:
    """The store of a resolved `config["data"]`, built if it is not there yet.

    Raises:
        UserError: for bad input and for a disk that cannot be written; nothing is left then.
    """
    source = open_source(data)
    description = {"name": data["source"], **source.identity()}
    plan = json.dumps([FORMAT, data["vocab_size"], description], sort_keys=True)
    cache = Path(data["cache_dir"])
    path = cache / f"{data['source']}-{sha256(plan.encode()).hexdigest()[:12]}"
    if not path.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(cache / f".{path.name}.lock"):
                if not path.exists():
                    _build(path, source, description, data, progress)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write {path}: {reason}: free some space or set data.cache_dir") from error
    return Store.open(path)


def _build(path: Path, source: Source, description: dict[str, Any], data: dict[str, Any], progress: bool) -> None:
    """Build aside, then rename: the folder appears whole."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed; we hold the lock
    partial.mkdir()
    try:
        build(partial, source, open_encoder(data), description, progress)
        if {"name": data["source"], **source.identity()} != description:
            raise UserError(f"the input of data.source={data['source']} changed while it was read: start again")
        for written in (*partial.rglob("*"), partial):
            _sync(written)
        partial.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` for this process, after any other that has it. The empty file stays: removing it would be a race."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {path.name[1:-5]}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
