"""Build a store's files from a source: read, encode in threads, append, and note progress after whole inputs.

`journal.jsonl` holds the plan and one line per commit, so an interrupted build resumes after its last commit and the
cost is linear in the number of inputs.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from simbal.data.document import SPLITS, Document, Encoder, Source
from simbal.errors import UserError

JOURNAL = "journal.jsonl"
GROUP = 1 << 20  # bytes of text that a thread encodes at once
COMMIT_SECONDS = 1.0  # between two commits, each of which waits for the disk
END, DIGEST = 8, 32  # bytes of a document in docs.idx and in digests.bin


class EndOfUnit(NamedTuple):
    """Follows the last document of a unit."""

    skipped: Counter[str]


class Encoded(NamedTuple):
    """A document and its ids, end of text included."""

    document: Document
    ids: NDArray[np.uint32]
    num_bytes: int  # of text that the ids stand for


Item = Document | EndOfUnit | UserError  # an error travels behind the documents before it, which are written first
EncodedItem = Encoded | EndOfUnit | UserError


@dataclass
class Tally:
    """Counts of finished units; `documents`, `tokens` and `bytes` by split and by input."""

    units: int = 0
    splits: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    inputs: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    skipped: Counter[str] = field(default_factory=Counter)

    def add_document(self, encoded: Encoded) -> None:
        """Count a document."""
        for counts in (self.splits[encoded.document.split], self.inputs[encoded.document.input]):
            counts["documents"] += 1
            counts["tokens"] += len(encoded.ids)
            counts["bytes"] += encoded.num_bytes

    def add(self, units: int, splits: dict[str, Any], inputs: dict[str, Any], skipped: dict[str, int]) -> None:
        """Add the fields of another tally."""
        self.units += units
        for mine, others in ((self.splits, splits), (self.inputs, inputs)):
            for name, counts in others.items():
                mine[name].update(counts)
        self.skipped.update(skipped)


class Journal:
    """The progress of a build on disk: a line with its plan, then one line per commit."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        """Continue the journal in `folder`, or empty the folder and begin a new one if it has none of this plan."""
        self._file, self._pending, self.total = folder / JOURNAL, Tally(), Tally()
        lines = _read_journal(folder)
        if lines and lines[0] == plan:
            for line in lines[1:]:
                self.total.add(**line)
            return
        if lines:
            print("the input has changed since the interrupted build: starting over", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._append(plan)

    @property
    def units(self) -> int:
        """The number of finished units."""
        return self.total.units + self._pending.units

    def finish_unit(self, tally: Tally, skipped: Counter[str]) -> None:
        """Note a finished unit, to be committed."""
        self._pending.add(1, tally.splits, tally.inputs, skipped)

    def commit(self, writers: Iterable["SplitWriter"]) -> None:
        """Append a line for all units finished since the last commit, once their documents are on the disk."""
        pending, self._pending = self._pending, Tally()  # so that no interruption can append them twice
        if pending.units:
            for writer in writers:
                writer.sync()
            self._append(vars(pending))
            self.total.add(**vars(pending))

    def _append(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            _sync(file)


class SplitWriter:
    """Appends documents to a split's tokens.bin, docs.idx and, for the text's fingerprint, digests.bin."""

    def __init__(self, folder: Path, vocab_size: int, counts: Counter[str], stack: ExitStack) -> None:
        """Continue after the documents and tokens that `counts` names; whatever follows them is cut off."""
        folder.mkdir(exist_ok=True)
        self._dtype, self._end = np.dtype(token_dtype(vocab_size)), counts["tokens"]
        sizes = {
            "tokens.bin": self._end * self._dtype.itemsize,
            "docs.idx": counts["documents"] * END,
            "digests.bin": counts["documents"] * DIGEST,
        }
        self._files = [stack.enter_context((folder / name).open("ab")) for name in sizes]
        for file, size in zip(self._files, sizes.values(), strict=True):
            file.truncate(size)

    def write(self, ids: NDArray[np.uint32], digest: bytes) -> None:
        """Append one document, its end of text included; its ids must be below the vocabulary size."""
        self._end += len(ids)
        tokens, ends, digests = self._files
        tokens.write(ids.astype(self._dtype).tobytes())
        ends.write(self._end.to_bytes(END, "little"))
        digests.write(digest)

    def sync(self) -> None:
        """Flush the files to the disk."""
        for file in self._files:
            _sync(file)


def build(
    folder: Path, source: Source, encoder: Encoder, threads: int | None, progress: bool, splits: Sequence[str] = SPLITS
) -> tuple[Tally, bool]:
    """Write the documents of `splits` to `folder`, after those that an interrupted build has committed.

    Where a split gets no document, the source is read again with the ends of documents held out, if it can be.

    Args:
        folder: empty, or what an earlier call left.
        source: yields the documents.
        encoder: tokenizes them.
        threads: that encode; None: one per core.
        progress: whether to show a live view.
        splits: the splits to write.

    Returns:
        The counts, and whether ends of documents are held out.

    Raises:
        UserError: for a bad input, and if one of `splits` gets no document.
    """
    plan = {"units": source.units(splits), "ends": False}
    by_ends, total = source.with_ends_held_out(), Tally()
    if by_ends is None or _read_journal(folder)[:1] != [plan | {"ends": True}]:
        total = _write_splits(folder, source, encoder, threads, progress, splits, plan)
        if all(total.splits[split]["documents"] for split in splits):
            return total, False
    if by_ends is not None:
        if total.units:
            (folder / JOURNAL).unlink()
        total = _write_splits(folder, by_ends, encoder, threads, progress, splits, plan | {"ends": True})
    for split in splits:
        if not total.splits[split]["documents"]:
            shutil.rmtree(folder)  # another build of the same input would end here, too
            documents = sum(counts["documents"] for counts in total.splits.values())
            raise UserError(
                f"none of the {documents} documents falls into the {split} split: "
                "give more documents, data.validation_files or another data.validation_one_in"
            )
    return total, True


def _write_splits(
    folder: Path,
    source: Source,
    encoder: Encoder,
    threads: int | None,
    progress: bool,
    splits: Sequence[str],
    plan: dict[str, Any],
) -> Tally:
    """Read and write the units that the journal does not list as finished; return the counts of all units."""
    journal = Journal(folder, plan)
    left, unit = plan["units"][journal.units :], Tally()
    committed = time.monotonic()
    with ExitStack() as stack:
        counts = journal.total.splits
        writers = {split: SplitWriter(folder / split, encoder.vocab_size, counts[split], stack) for split in SPLITS}
        report = stack.enter_context(_progress_bar(progress, counts))
        stack.callback(lambda: journal.commit(writers.values()))  # at the end, and also when the build is interrupted
        for group in _encode(_documents(source, left, splits), encoder, threads or os.cpu_count() or 1):
            for item in group:
                if isinstance(item, UserError):
                    hint = f"\nrun it again to continue after input {journal.units} of {len(plan['units'])}"
                    raise UserError(f"{item}{hint if journal.units else ''}") from item
                if isinstance(item, EndOfUnit):
                    journal.finish_unit(unit, item.skipped)
                    unit = Tally()
                else:
                    writers[item.document.split].write(item.ids, item.document.digest)
                    unit.add_document(item)
            if time.monotonic() - committed > COMMIT_SECONDS:
                journal.commit(writers.values())
                committed = time.monotonic()
            report(group)
    return journal.total


def _documents(source: Source, units: Sequence[str], splits: Sequence[str]) -> Iterator[Item]:
    for unit in units:
        skipped: Counter[str] = Counter()
        try:
            yield from (document for document in source.read(unit, skipped) if document.split in splits)
        except UserError as error:
            yield error
            return
        yield EndOfUnit(skipped)


def _encode(items: Iterable[Item], encoder: Encoder, threads: int) -> Iterator[list[EncodedItem]]:
    """Yield the documents with their ids, a group at a time, in order."""
    waiting: deque[Future[list[EncodedItem]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for group in _groups(items):
            if len(waiting) > 2 * threads:  # the reader is ahead
                yield waiting.popleft().result()
            waiting.append(pool.submit(_encode_group, encoder, group))
        while waiting:
            yield waiting.popleft().result()


def _encode_group(encoder: Encoder, group: list[Item]) -> list[EncodedItem]:
    """Encode the documents; IndexError for an id outside of the vocabulary, which a narrower type would wrap around."""
    eot, encoded = np.uint32(encoder.eot), list[EncodedItem]()
    for item in group:
        if isinstance(item, Document):
            ids = np.append(encoder.encode(item.content), eot)
            encoded.append(Encoded(item, ids, int(encoder.byte_len[ids].sum())))
        else:
            encoded.append(item)
    return encoded


def _groups(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield groups of about `GROUP` bytes of text."""
    group, size = list[Item](), 0
    for item in items:
        group.append(item)
        size += len(item.content) if isinstance(item, Document) else 0
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextmanager
def _progress_bar(visible: bool, counts: dict[str, Counter[str]]) -> Iterator[Callable[[list[EncodedItem]], None]]:
    """Yield a function that adds a group of documents to a bar on standard error, which begins with `counts`."""
    documents, tokens = (sum(of_split[key] for of_split in counts.values()) for key in ("documents", "tokens"))
    shown = "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
    columns = (TextColumn("preparing"), BarColumn(), TextColumn(shown), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("", total=1.0, documents=documents, tokens=tokens, speed=0.0)
        num_bytes = 0

        def report(group: list[EncodedItem]) -> None:
            nonlocal documents, tokens, num_bytes
            encoded = [item for item in group if isinstance(item, Encoded)]
            if not visible or not encoded:
                return
            documents += len(encoded)
            tokens += sum(len(item.ids) for item in encoded)
            num_bytes += sum(item.num_bytes for item in encoded)
            speed = num_bytes / 1e6 / (bar.tasks[0].elapsed or 1.0)
            bar.update(task, completed=encoded[-1].document.done, documents=documents, tokens=tokens, speed=speed)

        yield report


def token_dtype(vocab_size: int) -> str:
    """Return the narrower of the two types on disk that holds every id: `<u2` or `<u4`."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def finished_units(folder: Path) -> int:
    """Return how many units of an interrupted build are finished."""
    return sum(line["units"] for line in _read_journal(folder)[1:])


def _read_journal(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal, and cut off one that was not written to its end; [] if none can be read."""
    file = folder / JOURNAL
    try:
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(file, whole)
        return [json.loads(line) for line in content[:whole].splitlines()]
    except (OSError, ValueError):
        return []


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
