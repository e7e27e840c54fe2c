"""Tokens on disk: `<cache_dir>/<source>-<key>/`, complete or absent, never half-written.

What an interrupted build has finished waits in `<source>-<key>.partial`.

    meta.json                 what it holds and where it came from; written last
    byte_len.bin              <u2: bytes of text that each id stands for, 0 for end of text
    train/, validation/       tokens.bin: ids, <u2 or <u4, end of text after every document
                              docs.idx: <u8, the end of each document in tokens

No torch here: the sweep's parent process prepares the data of its runs.
"""

import fcntl
import json
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

from simbal import strict_json
from simbal.atomic_file import sync
from simbal.data import token_table
from simbal.data.builder import FORMAT, build
from simbal.data.document import SPLITS
from simbal.data.journal import Journal
from simbal.data.overlap import Overlap
from simbal.data.sources import Source, open_encoder, open_source
from simbal.data.store_meta import require_meta
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
            store = cls(path, strict_json.parse((path / "meta.json").read_bytes()))
            sizes = {path / "byte_len.bin": 2 * store.meta["vocab_size"]}
            for split in SPLITS:
                counts = store.meta["splits"][split]
                sizes[path / split / "tokens.bin"] = counts["tokens"] * np.dtype(store.meta["dtype"]).itemsize
                sizes[path / split / "docs.idx"] = 8 * counts["documents"]
            wrong = [file for file, size in sizes.items() if file.stat().st_size != size]
        except FileNotFoundError as error:
            wrong = [Path(error.filename)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
        lines.append(f"  {Overlap(**self.meta['validation_overlap'])}")
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.meta["skipped"].items())
        if left_out:
            lines.append(f"  left out: {left_out}")
        if replaced := self.meta["surrogates_replaced"]:
            lines.append(f"  {replaced:,} documents had lone surrogates, replaced by U+FFFD")
        lines += [f"  {kind} fingerprint {digest[:12]}" for kind, digest in self.fingerprints.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """What a resolved `config["data"]` asks for, and the folder whose name that decides."""

    data: dict[str, Any]
    source: Source
    description: dict[str, Any]  # of the source
    path: Path

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Plan":
        """Nothing is read yet but names, sizes and versions; `UserError` if they make no sense."""
        source = open_source(data)
        description = {"name": data["source"], **source.identity()}
        key = sha256(json.dumps([FORMAT, data["vocab_size"], description], sort_keys=True).encode()).hexdigest()
        return cls(data, source, description, Path(data["cache_dir"], f"{data['source']}-{key[:12]}"))

    def open(self) -> Store:
        """The prepared store; `UserError` if it is damaged, or not what its folder's name says."""
        store = Store.open(self.path)
        wanted = {
            "format": FORMAT,
            "source": json.loads(json.dumps(self.description)),
            "vocab_size": self.data["vocab_size"],
            "tokenizer_sha256": None if self.data["source"] == "synthetic" else token_table.SHA256,
        }
        wrong = [key for key, value in wanted.items() if store.meta.get(key) != value]
        if wrong:
            raise UserError(f"{self.path} is not what its name says ({wrong[0]}): delete it and prepare it again")
        return store


def prepare(data: dict[str, Any], progress: bool) -> Store:
    """The store of a resolved `config["data"]`, built if it is not there yet.

    Raises:
        UserError: for bad input and for a disk that cannot be written; inputs that were finished are kept.
    """
    plan = Plan.of(data)
    try:
        if not plan.path.exists():
            plan.path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(plan.path.with_name(f".{plan.path.name}.lock")):
                if not plan.path.exists():
                    _build(plan, progress)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write {plan.path}: {reason}: free some space or set data.cache_dir") from error
    store = plan.open()
    require_meta(store.path, store.meta)
    return store


def _build(plan: Plan, progress: bool) -> None:
    """Build aside, then rename: the folder appears whole. A build that was interrupted is gone on with."""
    partial = plan.path.with_name(f"{plan.path.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        build(partial, plan.source, open_encoder(plan.data), plan.description, plan.data["threads"], progress)
        if Plan.of(plan.data).path != plan.path:
            shutil.rmtree(partial)
            raise UserError(f"the input of data.source={plan.data['source']} changed while it was read: start again")
        for written in (*partial.rglob("*"), partial):
            sync(written)
        partial.rename(plan.path)
        sync(plan.path.parent)
    except BaseException as error:
        journal = Journal.read(partial)
        kept, total = len(journal.units), len(journal.planned)
        if kept == 0 or (kept == total and isinstance(error, UserError)):  # nothing to go on with, or no way to
            shutil.rmtree(partial, ignore_errors=True)
        elif isinstance(error, UserError):
            raise UserError(f"{error}\nrun it again to continue after input {kept} of {total}") from error
        raise


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
