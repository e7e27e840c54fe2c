"""Prepares a data set: reads documents from a source, tokenizes them in threads, and writes tokens in one pass.

Data are built in `<source>-<key>.partial`, which is renamed at the end. An interrupted build resumes after the last
input that it committed to `progress.json`.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from simbal.config.compose import validate_data
from simbal.config.schema import DataConfig
from simbal.data.files import Files, open_dclm
from simbal.data.overlap import shared_documents, shared_windows
from simbal.data.sources import SPLITS, VALIDATION, Document, PySource, Source, Synthetic, sha256_of
from simbal.data.store import FILES, META, Store, hash_file, read_array, token_dtype, write_verified
from simbal.data.tokenizer import Encoder, SymbolEncoder, load_tokenizer
from simbal.errors import UserError
from simbal.processes import usable_cores
from simbal.runs.atomic import atomic_write, describe_write_error, is_locked, lock, remove_partial_files, sync_to_disk
from simbal.runs.record import with_checksum

FORMAT = 4  # increase it when the same config would produce different files
KINDS = ("documents", "tokens", "bytes")  # that are counted in each split
PROGRESS, DIGESTS = "progress.json", "digests.bin"  # removed when the build is complete
GROUP_BYTES = 1 << 20  # text that a thread encodes at once
COMMIT_SECONDS = 1.0  # between commits, which wait for the disk
SAMPLE_TOKENS = 64  # tokens of each split that check=true prints


class Encoded(NamedTuple):
    """A document with its ids, including end of text."""

    document: Document
    ids: NDArray[np.uint32]
    num_bytes: int  # bytes of text that the ids encode


Item = Document | Counter[str]  # a Counter at the end of each input, with the counts to add
EncodedItem = Encoded | Counter[str]


@dataclass(frozen=True)
class Plan:
    """The store that a config's `data` group describes."""

    data: DataConfig
    source: Source
    description: dict[str, Any]  # of the source
    path: Path  # its name contains a hash of everything that determines the files
    encoder: Encoder | None = None  # replaces the config's encoder; the store then has only the validation split

    @property
    def splits(self) -> Sequence[str]:
        """The splits that the store contains."""
        return (VALIDATION,) if self.encoder else SPLITS

    @property
    def threads(self) -> int:
        """The threads that tokenize and count."""
        return self.data.threads or usable_cores()

    @classmethod
    def of(cls, data: DataConfig, encoder: Encoder | None = None) -> "Plan":
        """Return the plan of `data`, from the names, sizes and versions of its inputs; `UserError` for a bad input."""
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
    if data.source == "dclm":
        return open_dclm(data)
    kinds: dict[str, Any] = {"pysource": PySource, "files": Files, "synthetic": Synthetic}
    kind = kinds[data.source]
    source: Source = kind(**{key: getattr(data, key) for key in kind.__dataclass_fields__ if hasattr(data, key)})
    return source


def open_encoder(data: DataConfig) -> Encoder:
    """Return the encoder of a source: cl100k_base, or none for synthetic symbols."""
    if data.source == "synthetic":
        return SymbolEncoder(data.vocab_size)
    return load_tokenizer(data.vocab_size, data.tokenizer_path)


def prepare(data: DataConfig, progress: bool, encoder: Encoder | None = None) -> Store:
    """Return the store that the config group `data` describes; build it first if it does not exist.

    Args:
        data: what to prepare, and where.
        progress: whether to show a progress bar.
        encoder: replaces the encoder of `data`; only the validation split is then prepared.

    Raises:
        UserError: for bad input, a disk that rejects writes, and a damaged store. A later call resumes after the last
            finished input.
    """
    plan = Plan.of(data, encoder)
    try:
        if not plan.path.exists():
            plan.path.parent.mkdir(parents=True, exist_ok=True)
            lock_file = plan.path.with_name(f".{plan.path.name}.lock")
            if is_locked(lock_file):
                print(f"waiting for another process to prepare {plan.path.name}", file=sys.stderr)
            with lock(lock_file, timeout=-1):
                if not plan.path.exists():
                    _build(plan, progress)
    except OSError as error:
        raise UserError(describe_write_error(plan.path, error, "data.cache_dir")) from error
    return Store.open(plan.path)


def _build(plan: Plan, progress: bool) -> None:
    """Build the store in a separate folder and rename that, so that the store appears only when it is complete."""
    partial = plan.path.with_name(f"{plan.path.name}.partial")
    encoder, source, by_ends = plan.encoder or open_encoder(plan.data), plan.source, plan.source.with_ends_held_out()
    try:
        counts = write_documents(partial, plan, source, encoder, progress)
        if by_ends and not all(counts[f"{split} documents"] for split in plan.splits):  # too few documents
            source = by_ends
            counts = write_documents(partial, plan, source, encoder, progress)
    except BaseException:
        if not (partial / PROGRESS).exists():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if empty := [split for split in plan.splits if not counts[f"{split} documents"]]:
        shutil.rmtree(partial)
        remedy = "add documents, or set data.validation_files or data.validation_one_in"
        raise UserError(f"the {empty[0]} split has no documents: {remedy}")
    if Plan.of(plan.data, plan.encoder).path != plan.path:
        shutil.rmtree(partial)
        raise UserError(f"the input of data={plan.data.source} changed while it was read: rerun the command")
    encoder.byte_len.astype("<u2").tofile(partial / "byte_len.bin")
    meta = _describe(partial, plan, encoder, counts) | {"ends_held_out": source is by_ends}
    (partial / META).write_bytes(orjson.dumps(with_checksum(meta), option=orjson.OPT_INDENT_2))
    for file in (partial / PROGRESS, *(partial / split / DIGESTS for split in SPLITS)):
        file.unlink(missing_ok=True)  # progress first: it must not outlive the files that it describes
    for path in (*partial.rglob("*"), partial):
        sync_to_disk(path)
    write_verified(partial)
    partial.rename(plan.path)
    sync_to_disk(plan.path.parent)
    if meta["ends_held_out"]:
        print(f"{plan.path.name}: {Store(plan.path, meta).describe_held_out_ends()}", file=sys.stderr)


def _describe(folder: Path, plan: Plan, encoder: Encoder, counts: Counter[str]) -> dict[str, Any]:
    """Return the content of meta.json."""
    files = {name: hash_file(folder / name) for name in FILES}
    text = "\n".join(f"{split} {hash_file(folder / split / DIGESTS)}" for split in SPLITS)
    tokens = "\n".join(f"{split} {files[f'{split}/tokens.bin']}" for split in SPLITS)
    return {
        "format": FORMAT,
        "source": plan.description,
        "dtype": token_dtype(encoder.vocab_size),
        "vocab_size": encoder.vocab_size,
        "eot": encoder.eot,
        "tokenizer_sha256": encoder.table_sha256,
        "splits": {split: {kind: counts[f"{split} {kind}"] for kind in KINDS} for split in plan.splits},
        "inputs": plan.source.inputs(plan.splits),
        "skipped": {key.removeprefix("skipped: "): counts[key] for key in counts if key.startswith("skipped: ")},
        "validation_overlap": None if plan.encoder else _count_overlap(folder, encoder, counts, plan.threads),
        # independent of paths, times, machines and compression
        "fingerprints": {
            "text": sha256(text.encode()).hexdigest(),
            "tokens": sha256(f"{tokens}\nvocab_size {encoder.vocab_size}".encode()).hexdigest(),
        },
        "versions": {package: version(package) for package in ("simbal", "tiktoken", "numpy")},
        "files": files,
    }


def _count_overlap(folder: Path, encoder: Encoder, counts: Counter[str], threads: int) -> dict[str, int]:
    """Count the validation documents and windows, including repetitions, and how many of them also occur in train."""
    dtype = token_dtype(encoder.vocab_size)
    train, validation = (read_array(folder / split / "tokens.bin", dtype) for split in SPLITS)
    windows, validation_windows = shared_windows(train, validation, encoder.eot, threads=threads)
    return {
        "documents": shared_documents(*(folder / split / DIGESTS for split in SPLITS)),
        "validation_documents": counts[f"{VALIDATION} documents"],
        "windows": windows,
        "validation_windows": validation_windows,
    }


class SplitWriter:
    """Appends documents to the files of a split."""

    def __init__(self, folder: Path, vocab_size: int, counts: Counter[str], stack: ExitStack) -> None:
        """Continue after the committed documents and tokens in `counts`; truncate the rest."""
        folder.mkdir(exist_ok=True)
        documents, self._end = counts[f"{folder.name} documents"], counts[f"{folder.name} tokens"]
        self._dtype = np.dtype(token_dtype(vocab_size))
        sizes = {"tokens.bin": self._end * self._dtype.itemsize, "docs.idx": documents * 8, DIGESTS: documents * 32}
        self._files = [stack.enter_context((folder / name).open("ab")) for name in sizes]
        for file, size in zip(self._files, sizes.values(), strict=True):
            file.truncate(size)

    def write(self, ids: NDArray[np.uint32], digest: bytes) -> None:
        """Append a document with its end of text."""
        self._end += len(ids)
        tokens, ends, digests = self._files
        tokens.write(ids.astype(self._dtype).tobytes())
        ends.write(self._end.to_bytes(8, "little"))
        digests.write(digest)

    def sync(self) -> None:
        """Flush the files to the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())


def write_documents(folder: Path, plan: Plan, source: Source, encoder: Encoder, progress: bool) -> Counter[str]:
    """Write the documents of `source` to `folder`, after the inputs that an interrupted build committed there.

    Returns:
        The counts `inputs`, for each split `<split> documents`, `<split> tokens` and `<split> bytes`, and
        `skipped: <reason>`.

    Raises:
        UserError: for a bad input.
    """
    inputs, commit_time = source.inputs(plan.splits), time.monotonic()
    key = sha256(json.dumps([inputs, repr(source)]).encode()).hexdigest()
    counts = _read_progress(folder, key)
    with ExitStack() as stack:
        writers = {split: SplitWriter(folder / split, encoder.vocab_size, counts, stack) for split in SPLITS}
        columns = (TextColumn("preparing"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), disable=not progress))
        task = bar.add_task("", total=len(inputs))
        items = _read_items(source, inputs[counts["inputs"] :], plan.splits)
        for group in _encode(items, encoder, plan.threads):
            for item in group:
                if isinstance(item, Encoded):
                    split = item.document.split
                    writers[split].write(item.ids, sha256_of(item.document.content))
                    for kind, count in zip(KINDS, (1, len(item.ids), item.num_bytes), strict=True):
                        counts[f"{split} {kind}"] += count
                    continue
                counts.update(item)
                if time.monotonic() - commit_time >= COMMIT_SECONDS:
                    for writer in writers.values():
                        writer.sync()
                    with atomic_write(folder / PROGRESS) as file:
                        file.write(json.dumps({"key": key, "counts": counts}).encode())
                    commit_time = time.monotonic()
            documents, tokens = (sum(counts[f"{split} {kind}"] for split in SPLITS) for kind in ("documents", "tokens"))
            completed = counts["inputs"] + (item.document.progress if isinstance(item, Encoded) else 0)
            bar.update(task, completed=completed, description=f"{documents:,} documents, {tokens:,} tokens")
    return counts


def _read_progress(folder: Path, key: str) -> Counter[str]:
    """Return the committed counts of an interrupted build with this key; without one, empty the folder."""
    with suppress(OSError, ValueError):
        progress = json.loads((folder / PROGRESS).read_bytes())
        if progress["key"] == key:
            remove_partial_files(folder)
            return Counter(progress["counts"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Counter()


def _read_items(source: Source, inputs: Sequence[str], splits: Sequence[str]) -> Iterator[Item]:
    """Yield the documents of `splits`, and at the end of each input the counts to add."""
    for name in inputs:
        skipped = Counter[str]()
        yield from (document for document in source.read(name, skipped) if document.split in splits)
        yield Counter({"inputs": 1} | {f"skipped: {reason}": count for reason, count in (+skipped).items()})


def _encode(items: Iterable[Item], encoder: Encoder, threads: int) -> Iterator[list[EncodedItem]]:
    """Encode documents in threads, and yield groups of items in order."""
    waiting: deque[Future[list[EncodedItem]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for group in _groups(items):
            waiting.append(pool.submit(_encode_group, encoder, group))
            while len(waiting) > 2 * threads or (waiting and waiting[0].done()):
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _groups(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield groups of items with about `GROUP_BYTES` of text, because smaller tasks would slow down threads."""
    group, size = list[Item](), 0
    for item in items:
        group.append(item)
        size += len(item.content) if isinstance(item, Document) else 0
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode_group(encoder: Encoder, group: list[Item]) -> list[EncodedItem]:
    """Encode documents; `IndexError` for an id outside the vocabulary, which a narrower type would wrap around."""

    def encode(item: Item) -> EncodedItem:
        if not isinstance(item, Document):
            return item
        ids = np.append(encoder.encode(item.content), np.uint32(encoder.eot))
        return Encoded(item, ids, int(encoder.byte_len[ids].sum()))

    return [encode(item) for item in group]


def prepare_or_check(plain: Any, check: bool) -> list[str]:
    """Prepare the store of a composed `data` group, or with `check` verify an existing one completely.

    Returns:
        Lines that describe the store.

    Raises:
        UserError: for a bad config or input, or a store that is missing or damaged.
    """
    data = validate_data(plain)
    if not check:
        return [prepare(data, progress=True).summary()]
    path = Plan.of(data).path
    if not path.exists():
        raise UserError(f"no prepared data in {path}: run without check=true first")
    store = Store.open(path, rehash=True)
    lines = [store.summary(), f"verified the sha256 of all {len(store.meta['files'])} files"]
    if data.source != "synthetic":
        encoding = load_tokenizer(data.vocab_size, data.tokenizer_path).encoding
        for split in SPLITS:
            first = store.tokens(split)[: int(store.document_ends(split)[0]) - 1]
            # repr, because text may contain control characters
            lines.append(f"{split} starts with {encoding.decode(first[:SAMPLE_TOKENS].tolist())!r}")
    return lines
