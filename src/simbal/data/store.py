"""A store of tokens on disk, `<cache_dir>/<source>-<key>/`, complete or absent, never half-written, and its plan.

What an interrupted build has finished waits in `<source>-<key>.partial`.

    meta.json                 what it holds and where it came from, with sums over all files; written last
    verified.json             when these very files were last found to be what meta.json says
    byte_len.bin              <u2: bytes of text that each id stands for, 0 for end of text
    train/, validation/       tokens.bin: ids, <u2 or <u4, end of text after every document
                              docs.idx: <u8, the end of each document in tokens

No torch here: the sweep's parent process prepares the data of its runs.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.config.schema import DataConfig
from simbal.data import tokenizer
from simbal.data.builder import FORMAT, Journal, build
from simbal.data.document import SPLITS, Encoder, Source
from simbal.data.held_out import VALIDATION, HeldOutOnly
from simbal.data.overlap import Overlap
from simbal.data.sources.dclm import DCLM
from simbal.data.sources.files import Files
from simbal.data.sources.pysource import PySource
from simbal.data.sources.synthetic import Symbols, Synthetic
from simbal.data.verification import FILES, META, Verification, read_meta, require_meta
from simbal.errors import UserError
from simbal.files.disk import refusal, sync
from simbal.files.locks import Lock, TakenError
from simbal.runs import record

PARTIAL = ".partial"  # the suffix of a folder in which a store is being built
SOURCES: dict[str, Any] = {"pysource": PySource, "files": Files, "dclm": DCLM, "synthetic": Synthetic}


@dataclass(frozen=True)
class Store:
    """A prepared data set; its arrays are memory-mapped and read-only."""

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Read `meta.json` and check every file's size against it; `Store.verified` also reads the files.

        Raises:
            UserError: if the folder was damaged after it was written, or cannot be read.
        """
        file = path / META
        try:
            store = cls(path, read_meta(path))
            for name, size in zip(FILES[1:], store._sizes(), strict=True):
                file = path / name
                if file.stat().st_size != size:
                    raise ValueError(name)
        except PermissionError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{file} is damaged: delete {path} and prepare it again") from None
        return store

    @classmethod
    def verified(cls, path: Path, remember: bool) -> "Store":
        """Open a store whose every file is what `meta.json` says.

        Args:
            path: its folder.
            remember: whether to note there that it was verified, so that the next call takes no time.

        Raises:
            UserError: if a file is not what `meta.json` says, with its name.
        """
        verification = Verification(path)
        store = cls.open(path)
        require_meta(path, store.meta)
        verification.require(store.meta, remember)
        return store

    def _sizes(self) -> Iterator[int]:
        """Yield the bytes of `byte_len.bin` and of each split's two files, in the order of `FILES`."""
        yield 2 * self.meta["vocab_size"]
        for split in SPLITS:
            counts = self.meta["splits"][split]
            yield counts["tokens"] * np.dtype(self.meta["dtype"]).itemsize
            yield 8 * counts["documents"]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The sha256 of the `text` and of the `tokens`, 64 hex digits each."""
        return dict(self.meta["fingerprints"])

    @property
    def byte_len(self) -> NDArray[np.uint16]:
        """Bytes of text that each id stands for, (V,)."""
        return np.memmap(self.path / "byte_len.bin", "<u2", "r")

    def tokens(self, split: str) -> NDArray[Any]:
        """Return all ids of a split, (tokens,); uint16, or uint32 for a vocabulary above 65536."""
        return np.memmap(self.path / split / "tokens.bin", self.meta["dtype"], "r")

    def document_ends(self, split: str) -> NDArray[np.uint64]:
        """Return the position after each document's end of text, (documents,), increasing."""
        return np.memmap(self.path / split / "docs.idx", "<u8", "r")

    def held_out(self) -> list[str]:
        """Return a sentence where ends of documents are held out, as there were too few to hold out whole ones."""
        if "held_out" not in self.meta:
            return []
        percent = 100 / self.meta["source"]["validation_one_in"]
        return [f"too few documents to hold one out: the last {percent:.2g}% of each is (data.validation_one_in)"]

    def summary(self) -> str:
        """Return the folder, the sizes and the fingerprints as lines for people."""
        lines = [str(self.path)]
        lines += [
            f"  {split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes'] / counts['tokens']:.3f} bytes per token"
            for split, counts in self.meta["splits"].items()
            if counts["tokens"]
        ]
        if "only" not in self.meta:
            lines.append(f"  {Overlap(**self.meta['validation_overlap'])}")
        lines += [f"  {sentence}" for sentence in self.held_out()]
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.meta["skipped"].items())
        if left_out:
            lines.append(f"  left out: {left_out}")
        if replaced := self.meta["surrogates_replaced"]:
            lines.append(f"  {replaced:,} documents had lone surrogates, replaced by U+FFFD")
        lines += [f"  {kind} fingerprint {digest[:12]}" for kind, digest in self.fingerprints.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """The store that a config's group `data` asks for, and the folder whose name follows from it."""

    data: DataConfig
    source: Source
    description: dict[str, Any]  # of the source
    path: Path
    encoder: Encoder | None = None  # another than the config's; then of the validation split alone

    @classmethod
    def of(cls, data: DataConfig, encoder: Encoder | None = None) -> "Plan":
        """Return the plan of `data`; names, sizes and versions are read, and `UserError` if they make no sense.

        With an `encoder` of somebody else's it is one of the validation split alone.
        """
        source = open_source(data)
        description = {"name": data.source, **source.identity()}
        facts: list[Any] = [FORMAT, data.vocab_size, description]
        if encoder is not None:
            source = HeldOutOnly(source)
            description |= {"splits": [VALIDATION]}
            facts = [FORMAT, encoder.vocab_size, description, encoder.table_sha256]
        key = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return cls(data, source, description, Path(data.cache_dir, f"{data.source}-{key[:12]}"), encoder)

    @property
    def wanted_tokenizer(self) -> tuple[int, str | None]:
        """The number of ids, and the sha256 of the token table."""
        if self.encoder is not None:
            return self.encoder.vocab_size, self.encoder.table_sha256
        return self.data.vocab_size, None if self.data.source == "synthetic" else tokenizer.SHA256

    def require(self, store: Store) -> Store:
        """Return `store`; `UserError` unless it is what its folder's name says."""
        vocab_size, table = self.wanted_tokenizer
        wanted = {
            "format": FORMAT,
            "source": record.sealed({"source": self.description})["source"],
            "vocab_size": vocab_size,
            "tokenizer_sha256": table,
        }
        wrong = [key for key, value in wanted.items() if store.meta.get(key) != value]
        if wrong:
            raise UserError(f"{self.path} is not what its name says ({wrong[0]}): delete it and prepare it again")
        return store


def open_source(data: DataConfig) -> Source:
    """Return the source that `data.source` names, made from the keys it asks for."""
    source = SOURCES[data.source]
    opened: Source = source(**{field.name: getattr(data, field.name) for field in fields(source)})
    return opened


def open_encoder(data: DataConfig) -> Encoder:
    """Return the encoder of a source: the identity for synthetic symbols, cl100k_base for text."""
    if data.source == "synthetic":
        return Symbols(data.vocab_size)
    return tokenizer.load_tokenizer(data.vocab_size, data.tokenizer_path)


def prepare(data: DataConfig, progress: bool, encoder: Encoder | None = None) -> Store:
    """Return the store that the group `data` of a config asks for, built if it is not there yet, and verified.

    Args:
        data: says what to prepare, and where.
        progress: whether to show a live view.
        encoder: another than that of `data`; then the validation split alone is read and prepared.

    Raises:
        UserError: for bad input, for a disk that cannot be written (inputs that were finished are kept), and for a
            store that is not what was prepared.
    """
    plan = Plan.of(data, encoder)
    try:
        if not os.path.lexists(plan.path):
            plan.path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(plan.path):
                if not os.path.lexists(plan.path):
                    _build(plan, progress)
    except OSError as error:
        raise UserError(refusal(plan.path, error, "data.cache_dir")) from error
    return plan.require(Store.verified(plan.path, remember=True))


def find(cache_dir: Path, tokens: str, remember: bool) -> Store | None:
    """Return the verified store below `cache_dir` whose fingerprint of the tokens is `tokens`; None if there is none.

    Args:
        cache_dir: the folder of stores; it need not exist, and is not created.
        tokens: 64 hex digits.
        remember: whether to note in the store that it was verified, so that the next call takes no time.

    Raises:
        UserError: if there is one that says it has these tokens, and is not what was prepared.
    """
    damage: UserError | None = None
    for folder in sorted(file.parent for file in cache_dir.glob(f"*/{META}")):
        try:
            about = read_meta(folder)
            wanted = about["format"] == FORMAT and about["fingerprints"]["tokens"] == tokens
        except (OSError, ValueError, KeyError, TypeError):
            continue  # broken, or of something else
        if wanted and folder.suffix != PARTIAL:
            try:
                return Store.verified(folder, remember)
            except UserError as error:
                damage = damage or error
    if damage:
        raise damage
    return None


def _build(plan: Plan, progress: bool) -> None:
    """Build aside, then rename, so that the folder appears whole; an interrupted build is continued."""
    partial = plan.path.with_name(f"{plan.path.name}{PARTIAL}")
    partial.mkdir(exist_ok=True)
    try:
        by_ends = plan.source.by_ends() if isinstance(plan.source, Files | HeldOutOnly) else None
        encoder, splits = plan.encoder or open_encoder(plan.data), (VALIDATION,) if plan.encoder else SPLITS
        build(partial, plan.source, encoder, plan.description, plan.data.threads, progress, by_ends, splits)
        if Plan.of(plan.data, plan.encoder).path != plan.path:
            shutil.rmtree(partial)
            raise UserError(f"the input of data.source={plan.data.source} changed while it was read: start again")
        for written in (*partial.rglob("*"), partial):
            sync(written)
        partial.rename(plan.path)
        sync(plan.path.parent)
        for sentence in Store(plan.path, read_meta(plan.path)).held_out():
            print(f"{plan.path.name}: {sentence}", file=sys.stderr)
    except BaseException as error:
        journal = Journal.read(partial)
        kept, total = len(journal.units), len(journal.planned)
        if kept == 0 or (kept == total and isinstance(error, UserError)):  # nothing to go on with, or no way to
            shutil.rmtree(partial, ignore_errors=True)
        elif isinstance(error, UserError):
            raise UserError(f"{error}\nrun it again to continue after input {kept} of {total}") from error
        raise


@contextmanager
def _lock(store: Path) -> Iterator[None]:
    """Hold the store's lock, after any other process that has it. The file stays, as removing it would be a race."""
    lock = Lock(store.with_name(f".{store.name}.lock"))
    with ExitStack() as held:
        try:
            held.enter_context(lock.held())
        except TakenError:
            print(f"waiting for another process that prepares {store.name}", file=sys.stderr)
            held.enter_context(lock.held(math.inf))
        yield
