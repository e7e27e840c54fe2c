"""Builds a store's folder from a source: encodes its documents in threads, writes tokens, statistics and fingerprints.

A journal in the folder says which units of the input are finished, so that an interrupted build goes on after them.
"""

import json
import os
import shutil
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from simbal.data.document import SPLITS, Document, Encoder, Source
from simbal.data.overlap import Overlap, shared_documents, shared_windows
from simbal.data.splits import SplitWriter, facts_of, hash_of, sizes, token_dtype
from simbal.data.verification import fingerprints, write_meta
from simbal.errors import UserError
from simbal.files.disk import remove_parts, replace_text

GROUP = 1 << 20  # bytes of text that a thread encodes at once
MOST = 1 << 27  # bytes of text that wait for a thread, but for one group, which may be a single long document
NAME, CHECKSUM = "journal.json", "checksum"  # the latter of all else in it
FORMAT = 3  # to be raised when the same config would give other files

Report = Callable[[float, int, int, int], None]  # of a build: share of the input, documents, tokens, bytes of text


class Encoded(NamedTuple):
    """A document and its ids, end of text included."""

    document: Document
    ids: NDArray[np.uint32]
    num_bytes: int  # of text that the ids stand for


class Encoders:
    """Threads that encode documents, the same ones from the first to the last; `threads` None: one per core."""

    def __init__(self, encoder: Encoder, threads: int | None) -> None:
        self.encoder = encoder
        self.threads = threads or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self.threads)

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode(self, documents: Iterable[Document]) -> Iterator[list[Encoded]]:
        """Yield the documents with their ids, a group at a time, in order.

        Raises:
            IndexError: an id is not below the vocabulary size, which a narrower type would silently wrap around.
        """
        waiting: deque[tuple[Future[list[Encoded]], int]] = deque()
        held = 0  # bytes of text
        for group, size in _groups(documents):
            while len(waiting) > 2 * self.threads or (waiting and held + size > MOST):  # the reader is ahead
                first, first_size = waiting.popleft()
                held -= first_size
                yield first.result()
            waiting.append((self._pool.submit(self._encode_group, group), size))
            held += size
        while waiting:
            yield waiting.popleft()[0].result()

    def _encode_group(self, group: list[Document]) -> list[Encoded]:
        eot, encoded = np.uint32(self.encoder.eot), []
        for document in group:
            ids = np.append(self.encoder.encode(document.content), eot)
            encoded.append(Encoded(document, ids, int(self.encoder.byte_len[ids].sum())))
        return encoded


@dataclass
class Journal:
    """The progress of a build, as journal.json holds it; a new one says that nothing is finished."""

    planned: list[str] = field(default_factory=list)  # all units, in order
    units: list[str] = field(default_factory=list)  # those that are finished
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    inputs: list[dict[str, Any]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    ends: bool = False  # whether ends of documents are held out, as no whole one is
    sha256: dict[str, list[str]] = field(default_factory=dict)  # of each split's files, in hex, as `sizes` names them

    @classmethod
    def read(cls, folder: Path) -> "Journal":
        """Return the journal that an interrupted build left, or an empty one if there is none that makes sense."""
        try:
            state = orjson.loads((folder / NAME).read_bytes())
            if state.pop(CHECKSUM) != _checksum(state):
                return cls()
            return cls(**state | {"skipped": Counter(state["skipped"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Replace the file atomically, as the process may be killed at any moment."""
        replace_text(folder / NAME, json.dumps(vars(self) | {CHECKSUM: _checksum(vars(self))}))


def _checksum(state: dict[str, Any]) -> str:
    return sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


class _Input:
    """The counts and the text's hash of one input, a file or package."""

    def __init__(self) -> None:
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self.text = sha256()  # over the digests of the documents, in order

    def add(self, encoded: Encoded) -> None:
        self.counts["documents"] += 1
        self.counts["tokens"] += len(encoded.ids)
        self.counts["bytes"] += encoded.num_bytes
        self.text.update(encoded.document.digest)


def build(
    folder: Path,
    source: Source,
    encoder: Encoder,
    description: dict[str, Any],
    threads: int | None,
    progress: bool,
    by_ends: Source | None = None,
    splits: Sequence[str] = SPLITS,
) -> None:
    """Fill `folder`, `meta.json` last, going on after the units that an interrupted build had finished.

    Args:
        folder: empty, or what an earlier call with the same source and encoder left.
        source: where the documents come from.
        encoder: what turns them into ids.
        description: the entry `source` of meta.json.
        threads: the number of threads that encode; None: one per core.
        progress: whether to show a live view.
        by_ends: the same documents with their ends held out, for where a split gets none of them; None: an error.
        splits: those that the source gives documents of; the others stay empty.

    Raises:
        UserError: for a bad input, and if one of `splits` gets no document.
    """
    journal = _begin(folder, source.units(), encoder.vocab_size, by_ends is not None)
    with ExitStack() as stack:
        encoders = stack.enter_context(Encoders(encoder, threads))
        report = stack.enter_context(build_progress(progress))
        if not journal.ends:
            _read(folder, source, encoders, journal, report)
            if by_ends and not all(journal.documents[split] for split in splits):
                _empty(folder)
                journal = Journal(planned=journal.planned, ends=True)
        if by_ends and journal.ends:
            _read(folder, by_ends, encoders, journal, report)
    overlap = _overlap(folder, encoder, journal, encoders.threads, splits)
    _finish(folder, encoder, description, journal, overlap, splits)


def _read(folder: Path, source: Source, encoders: Encoders, journal: Journal, report: Report) -> None:
    """Read and write the units that the journal does not call finished."""
    vocab_size, text_bytes = encoders.encoder.vocab_size, 0  # the latter read by this process
    with ExitStack() as stack:
        writers = {
            split: SplitWriter(folder / split, vocab_size, documents, journal.tokens[split], stack)
            for split, documents in journal.documents.items()
        }
        for unit in journal.planned[len(journal.units) :]:
            inputs: dict[str, _Input] = defaultdict(_Input)
            skipped: Counter[str] = Counter()
            for group in encoders.encode(source.read(unit, skipped)):
                for encoded in group:
                    writers[encoded.document.split].write(encoded.ids, encoded.document.digest)
                    inputs[encoded.document.input].add(encoded)
                    text_bytes += encoded.num_bytes
                documents, tokens = (sum(w.documents for w in writers.values()), sum(w.end for w in writers.values()))
                report(group[-1].document.done, documents, tokens, text_bytes)
            _commit(journal, folder, unit, writers, inputs, skipped)


@contextmanager
def build_progress(visible: bool) -> Iterator[Report]:
    """Yield a `Report` that draws a bar on standard error; it does nothing if not `visible`."""
    counts = "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
    columns = (TextColumn("preparing"), BarColumn(), TextColumn(counts), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("", total=1.0, documents=0, tokens=0, speed=0.0)

        def report(done: float, documents: int, tokens: int, text_bytes: int) -> None:
            speed = text_bytes / 1e6 / (bar.tasks[0].elapsed or 1.0)
            bar.update(task, completed=done, documents=documents, tokens=tokens, speed=speed)

        yield report


def _begin(folder: Path, units: list[str], vocab_size: int, ends: bool) -> Journal:
    """Return the journal to go on with; start over if the units are others by now, or the files are not as it says.

    `ends`: whether ends of documents can be held out; a journal that says they were, and they cannot, is forgotten.
    """
    journal = Journal.read(folder)
    if journal.planned == units and (ends or not journal.ends) and _is_whole(folder, journal, vocab_size):
        remove_parts(folder)
        return journal
    if (folder / NAME).is_file():
        print("what an interrupted build left does not fit these inputs: starting over", file=sys.stderr)
    _empty(folder)
    return Journal(planned=units)


def _is_whole(folder: Path, journal: Journal, vocab_size: int) -> bool:
    """Whether all files of both splits have what the journal says of them, if it says anything yet."""
    for split, sha256_of_files in journal.sha256.items():
        of_split = sizes(vocab_size, journal.documents[split], journal.tokens[split])
        for (name, size), expected in zip(of_split.items(), sha256_of_files, strict=True):
            file = folder / split / name
            if not file.is_file() or hash_of(file, size).hexdigest() != expected:
                return False
    return True


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)  # whatever lies there in the place of a file
    folder.mkdir()


def _commit(
    journal: Journal,
    folder: Path,
    unit: str,
    writers: dict[str, SplitWriter],
    inputs: dict[str, _Input],
    skipped: Counter[str],
) -> None:
    """Note in the journal that `unit` is finished, once its files are on the disk: a later kill costs nothing of it."""
    for split, writer in writers.items():
        writer.sync()
        journal.documents[split], journal.tokens[split] = writer.documents, writer.end
        journal.sha256[split] = writer.sha256
    journal.units.append(unit)
    journal.inputs += [
        {"name": name, **given.counts, "text_sha256": given.text.hexdigest()} for name, given in inputs.items()
    ]
    journal.skipped.update(skipped)
    journal.write(folder)


def _overlap(folder: Path, encoder: Encoder, journal: Journal, threads: int, splits: Sequence[str]) -> Overlap:
    for split in splits:
        if not journal.documents[split]:
            raise UserError(
                f"none of the {sum(journal.documents.values())} documents falls into the {split} split: "
                "give more documents, data.validation_files or another data.validation_one_in"
            )
    if len(splits) < len(SPLITS):
        return Overlap(0, journal.documents["validation"], 0, 0)
    train, validation = (folder / split for split in SPLITS)
    documents = shared_documents(train / "digests.bin", validation / "digests.bin")
    dtype = token_dtype(encoder.vocab_size)
    tokens = [np.memmap(split / "tokens.bin", dtype, "r") for split in (train, validation)]
    windows = shared_windows(tokens[0], tokens[1], encoder.eot, threads=threads)
    return Overlap(documents, journal.documents["validation"], *windows)


def _finish(
    folder: Path,
    encoder: Encoder,
    description: dict[str, Any],
    journal: Journal,
    overlap: Overlap,
    splits: Sequence[str],
) -> None:
    """Write byte_len.bin and meta.json, with all that follows from the whole files, read back from the disk."""
    byte_len = encoder.byte_len.astype("<u2")
    byte_len.tofile(folder / "byte_len.bin")
    dtype, facts, text = token_dtype(encoder.vocab_size), {}, {}
    for split in SPLITS:
        facts[split], fault = facts_of(folder / split, dtype, encoder.byte_len, encoder.eot)
        assert not fault, fault
        with (folder / split / "digests.bin").open("rb") as digests:
            text[split] = file_digest(digests, "sha256").hexdigest()
    meta = {
        "format": FORMAT,
        "source": description,
        "dtype": dtype,
        "vocab_size": encoder.vocab_size,
        "eot": encoder.eot,
        "byte_len_sha256": sha256(byte_len.data).hexdigest(),
        "tokenizer_sha256": encoder.table_sha256,
        "splits": {split: asdict(facts[split]) | {"text_sha256": text[split]} for split in SPLITS},
        "inputs": journal.inputs,
        "surrogates_replaced": journal.skipped.pop("surrogates replaced", 0),
        "skipped": dict(journal.skipped),
        "validation_overlap": asdict(overlap),
        "fingerprints": fingerprints(facts, text, encoder.vocab_size),
        "versions": {package: version(package) for package in ("simbal", "tiktoken", "numpy")},
    }
    more = {"held_out": "ends"} if journal.ends else {}
    write_meta(folder, meta | more | ({"only": splits[0]} if len(splits) == 1 else {}))
    for scaffold in (folder / NAME, *(folder / split / "digests.bin" for split in SPLITS)):
        scaffold.unlink()  # the journal first: it must not outlive what it speaks of


def _groups(documents: Iterable[Document]) -> Iterator[tuple[list[Document], int]]:
    """Yield groups of documents of about `GROUP` bytes of text, with the bytes of each."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= GROUP:
            yield group, size
            group, size = [], 0
    if group:
        yield group, size
