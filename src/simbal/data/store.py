"""A prepared data set on disk: `<cache_dir>/<source>-<key>/`, complete or absent, never half-written.

    meta.json                 what it holds and where it came from, with the sha256 of all other files; written last
    verified.json             the state in which each machine has found the files to be what meta.json says
    byte_len.bin              <u2: bytes of text that each id stands for, 0 for end of text
    train/, validation/       tokens.bin: ids, <u2 or <u4, end of text after every document
                              docs.idx: <u8, the end of each document in tokens

An interrupted build waits in `<source>-<key>.partial`. No torch here: the parent process of a sweep prepares the data.
"""

import json
import os
import shutil
import socket
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from simbal.config.schema import DataConfig
from simbal.data import tokenizer
from simbal.data.builder import JOURNAL, build, finished_units, token_dtype
from simbal.data.document import SPLITS, VALIDATION, Encoder, Source
from simbal.data.overlap import Overlap, shared_documents, shared_windows
from simbal.data.sources.dclm import open_dclm
from simbal.data.sources.files import Files
from simbal.data.sources.pysource import PySource
from simbal.data.sources.synthetic import Symbols, Synthetic
from simbal.errors import UserError
from simbal.files.disk import refusal, sync
from simbal.files.locks import LockedError, lock
from simbal.runs import record

FORMAT = 4  # to be raised when the same config would give other files
META, VERIFIED, DIGESTS = "meta.json", "verified.json", "digests.bin"
FILES = ("byte_len.bin", *(f"{split}/{file}" for split in SPLITS for file in ("tokens.bin", "docs.idx")))
PARTIAL = ".partial"
COUNTS = ("documents", "tokens", "bytes")  # of each split


@dataclass(frozen=True)
class Store:
    """A prepared data set; its arrays are memory-mapped and read-only."""

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: Path, again: bool = False, remember: bool = True) -> "Store":
        """Return the store in `path` once each file has the sha256 that meta.json names.

        Args:
            path: the store's folder.
            again: hash the files even if this machine has hashed the very same files before.
            remember: note in the folder that this machine has hashed them.

        Raises:
            UserError: a file is missing or damaged.
        """
        file = path / META
        try:
            meta = record.unsealed(file.read_bytes())
            stamps, remembered = _stamps(path), _read_verified(path)
            if again or remembered.get(socket.gethostname()) != stamps:
                for name, expected in meta["files"].items():
                    file = path / name
                    if _sha256_of(file) != expected:
                        raise ValueError("it is not what was written")
                if remember:
                    with suppress(OSError):  # a folder that cannot be written is hashed each time
                        (path / VERIFIED).write_text(json.dumps(remembered | {socket.gethostname(): stamps}))
        except PermissionError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is damaged ({error}): delete {path} and prepare it again") from None
        return cls(path, meta)

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
        return self._array(f"{split}/tokens.bin", self.meta["dtype"])

    def document_ends(self, split: str) -> NDArray[np.uint64]:
        """Return the position after each document's end of text, (documents,), increasing."""
        return self._array(f"{split}/docs.idx", "<u8")

    def _array(self, name: str, dtype: str) -> NDArray[Any]:
        file = self.path / name
        return np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)

    def held_out(self) -> list[str]:
        """Return a sentence if ends of documents are held out, since there were too few to hold out whole ones."""
        if not self.meta["ends_held_out"]:
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
        ]
        if self.meta["validation_overlap"]:
            lines.append(f"  {Overlap(**self.meta['validation_overlap'])}")
        lines += [f"  {sentence}" for sentence in self.held_out()]
        if skipped := ", ".join(f"{count:,} {reason}" for reason, count in self.meta["skipped"].items()):
            lines.append(f"  skipped or changed: {skipped}")
        lines += [f"  {kind} fingerprint {digest[:12]}" for kind, digest in self.fingerprints.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """The store that a config's group `data` asks for."""

    data: DataConfig
    source: Source
    description: dict[str, Any]  # of the source
    path: Path  # its folder, whose name follows from everything that determines the files
    encoder: Encoder | None = None  # instead of the config's; then the store has the validation split alone

    @classmethod
    def of(cls, data: DataConfig, encoder: Encoder | None = None) -> "Plan":
        """Return the plan of `data`; names, sizes and versions are read, and `UserError` if they make no sense."""
        source = open_source(data)
        description = {"name": data.source, **source.identity()}
        facts: list[Any] = [FORMAT, data.vocab_size, description]
        if encoder is not None:
            description |= {"splits": [VALIDATION]}
            facts = [FORMAT, encoder.vocab_size, description, encoder.table_sha256]
        key = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return cls(data, source, description, Path(data.cache_dir, f"{data.source}-{key[:12]}"), encoder)


def open_source(data: Any) -> Source:
    """Return the source that `data.source` names."""
    one_in = data.validation_one_in
    if data.source == "pysource":
        return PySource(data.packages, data.strict, one_in)
    if data.source == "dclm":
        return open_dclm(data)
    if data.source == "files":
        form = (data.text_key, data.encoding, data.txt_split, data.on_bad_record)
        return Files(data.files, data.validation_files, *form, one_in, data.cache_dir)
    sizes = (data.vocab_size, data.branching, data.documents, data.document_tokens)
    return Synthetic(*sizes, data.chain_seed, one_in)


def open_encoder(data: DataConfig) -> Encoder:
    """Return the encoder of a source: the identity for synthetic symbols, cl100k_base for text."""
    if data.source == "synthetic":
        return Symbols(data.vocab_size)
    return tokenizer.load_tokenizer(data.vocab_size, data.tokenizer_path)


def prepare(data: DataConfig, progress: bool, encoder: Encoder | None = None) -> Store:
    """Return the store that the group `data` of a config asks for, built if it is not there yet.

    Args:
        data: what to prepare, and where.
        progress: whether to show a live view.
        encoder: instead of that of `data`; then the validation split alone is read and prepared.

    Raises:
        UserError: for bad input, for a disk that cannot be written, and for a damaged store. A later call continues
            after the inputs that are finished.
    """
    plan = Plan.of(data, encoder)
    try:
        if not plan.path.exists():
            plan.path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as held:
                lock_file = plan.path.with_name(f".{plan.path.name}.lock")
                try:
                    held.enter_context(lock(lock_file))
                except LockedError:
                    print(f"waiting for another process that prepares {plan.path.name}", file=sys.stderr)
                    held.enter_context(lock(lock_file, timeout=-1))
                if not plan.path.exists():
                    _build(plan, progress)
    except OSError as error:
        raise UserError(refusal(plan.path, error, "data.cache_dir")) from error
    return Store.open(plan.path)


def find(cache_dir: Path, tokens: str, remember: bool = True) -> Store | None:
    """Return the store below `cache_dir` whose fingerprint of the tokens is `tokens`; None if there is none.

    Raises:
        UserError: the only such store is damaged.
    """
    damage = None
    for file in sorted(cache_dir.glob(f"*/{META}")):
        try:
            if record.unsealed(file.read_bytes())["fingerprints"]["tokens"] == tokens:
                return Store.open(file.parent, remember=remember)
        except UserError as error:
            damage = damage or error
        except (OSError, ValueError, KeyError):
            continue  # broken, or something else
    if damage:
        raise damage
    return None


def _build(plan: Plan, progress: bool) -> None:
    """Build in a folder aside, then rename it, so that the store appears whole."""
    partial = plan.path.with_name(f"{plan.path.name}{PARTIAL}")
    partial.mkdir(exist_ok=True)
    encoder, splits = plan.encoder or open_encoder(plan.data), (VALIDATION,) if plan.encoder else SPLITS
    try:
        counts, ends_held_out = build(partial, plan.source, encoder, plan.data.threads, progress, splits)
    except BaseException:
        if not finished_units(partial):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if Plan.of(plan.data, plan.encoder).path != plan.path:
        shutil.rmtree(partial)
        raise UserError(f"the input of data.source={plan.data.source} changed while it was read: start again")
    encoder.byte_len.astype("<u2").tofile(partial / "byte_len.bin")
    digests = {split: partial / split / DIGESTS for split in SPLITS}
    files = {name: _sha256_of(partial / name) for name in FILES}
    text = "\n".join(f"{split} {_sha256_of(file)}" for split, file in digests.items())
    tokens = "\n".join(f"{split} {files[f'{split}/tokens.bin']}" for split in SPLITS)
    meta = {
        "format": FORMAT,
        "source": plan.description,
        "dtype": token_dtype(encoder.vocab_size),
        "vocab_size": encoder.vocab_size,
        "eot": encoder.eot,
        "tokenizer_sha256": encoder.table_sha256,
        "splits": {split: {kind: counts[f"{split} {kind}"] for kind in COUNTS} for split in splits},
        "inputs": plan.source.units(splits),
        "skipped": {key.removeprefix("skipped: "): counts[key] for key in counts if key.startswith("skipped: ")},
        "ends_held_out": ends_held_out,
        "validation_overlap": _overlap(partial, encoder, counts, plan.data.threads) if splits == SPLITS else None,
        # no path, time, machine or compression changes these
        "fingerprints": {
            "text": sha256(text.encode()).hexdigest(),
            "tokens": sha256(f"{tokens}\nvocab_size {encoder.vocab_size}".encode()).hexdigest(),
        },
        "versions": {package: version(package) for package in ("simbal", "tiktoken", "numpy")},
        "files": files,
    }
    (partial / META).write_bytes(orjson.dumps(record.sealed(meta), option=orjson.OPT_INDENT_2))
    for scaffold in (partial / JOURNAL, *digests.values()):
        scaffold.unlink()  # the journal first: it must not outlive what it describes
    for written in (*partial.rglob("*"), partial):
        sync(written)
    (partial / VERIFIED).write_text(json.dumps({socket.gethostname(): _stamps(partial)}))
    partial.rename(plan.path)
    sync(plan.path.parent)
    for sentence in Store(plan.path, meta).held_out():
        print(f"{plan.path.name}: {sentence}", file=sys.stderr)


def _overlap(folder: Path, encoder: Encoder, counts: Counter[str], threads: int | None) -> dict[str, int]:
    train, validation = (folder / split for split in SPLITS)
    documents = shared_documents(train / DIGESTS, validation / DIGESTS)
    dtype = token_dtype(encoder.vocab_size)
    train_tokens, validation_tokens = (np.memmap(split / "tokens.bin", dtype, "r") for split in (train, validation))
    windows = shared_windows(train_tokens, validation_tokens, encoder.eot, threads=threads or os.cpu_count() or 1)
    return asdict(Overlap(documents, counts[f"{VALIDATION} documents"], *windows))


def _sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _stamps(folder: Path) -> list[list[int]]:
    """Return size, times of change and inode of each file: a copy or another content has other ones."""
    states = [(folder / name).stat() for name in FILES]
    return [[state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino] for state in states]


def _read_verified(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / VERIFIED).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
