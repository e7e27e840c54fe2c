"""Build a store's files from a source: read, encode in threads, append, and note progress after whole inputs.

`journal.jsonl` holds the plan and one line per commit, so an interrupted build resumes after its last commit and the
cost is linear in the number of inputs.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
SPLIT_FILES = ("tokens.bin", "docs.idx", "digests.bin")  # the last for the fingerprint of the text, and removed
END, DIGEST = 8, 32  # bytes of a document in the last two


class Encoded(NamedTuple):
    """A document and its ids, end of text included."""

    document: Document
    ids: NDArray[np.uint32]
    num_bytes: int  # of text that the ids stand for


# the counts at the end of a unit and an error travel behind the documents before them, which are written first
Item = Document | Counter[str] | UserError
EncodedItem = Encoded | Counter[str] | UserError


class Journal:
    """The progress of a build on disk: a line with its plan, then the counts of each commit.

    Counts are `units`, for each split `<split> documents`, `<split> tokens` and `<split> bytes`, and
    `skipped: <reason>`.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        """Continue the journal in `folder`, or empty the folder and begin a new one if it has none of this plan."""
        self._file, self._pending, self._counts = folder / JOURNAL, Counter[str](), Counter[str]()
        lines = _read_journal(folder)
        if lines[:1] == [plan]:
            for line in lines[1:]:
                self._counts.update(line)
            return
        if lines:
            print("the input has changed since the interrupted build: starting over", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._append(plan)

    @property
    def counts(self) -> Counter[str]:
        """The counts of all finished units."""
        return self._counts + self._pending

    def finish_unit(self, counts: Counter[str]) -> None:
        """Add the counts of a unit, to be committed."""
        self._pending.update(counts)

    def commit(self, writers: Iterable["SplitWriter"]) -> None:
        """Append a line for all units finished since the last commit, once their documents are on the disk."""
        pending, self._pending = self._pending, Counter()  # so that no interruption can append them twice
        if pending:
            for writer in writers:
                writer.sync()
            self._append(pending)
            self._counts.update(pending)

    def _append(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            _sync(file)


class SplitWriter:
    """Appends documents to the files of a split."""

    def __init__(self, folder: Path, vocab_size: int, counts: Counter[str], stack: ExitStack) -> None:
        """Continue after the documents and tokens that `counts` names; whatever follows them is cut off."""
        folder.mkdir(exist_ok=True)
        documents, self._end = (counts[f"{folder.name} {kind}"] for kind in ("documents", "tokens"))
        self._dtype = np.dtype(token_dtype(vocab_size))
        sizes = (self._end * self._dtype.itemsize, documents * END, documents * DIGEST)
        self._files = [stack.enter_context((folder / name).open("ab")) for name in SPLIT_FILES]
        for file, size in zip(self._files, sizes, strict=True):
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
) -> tuple[Counter[str], bool]:
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
        The counts of the journal, and whether ends of documents are held out.

    Raises:
        UserError: for a bad input, and if one of `splits` gets no document.
    """
    by_ends, units = source.with_ends_held_out(), source.units(splits)
    plans = [(source, {"units": units, "ends": False}), (by_ends, {"units": units, "ends": True})]
    begun = _read_journal(folder)[:1]
    for reader, plan in plans[begun == [plans[1][1]] :]:
        if reader is not None:
            journal = Journal(folder, plan)
            _write_units(folder, reader, encoder, threads or os.cpu_count() or 1, progress, splits, plan, journal)
            if all(journal.counts[f"{split} documents"] for split in splits):
                return journal.counts, reader is by_ends
            (folder / JOURNAL).unlink()  # another build of the same input would end here, too
    documents = sum(journal.counts[f"{split} documents"] for split in splits)
    empty = next(split for split in splits if not journal.counts[f"{split} documents"])
    raise UserError(
        f"none of the {documents} documents falls into the {empty} split: "
        "give more documents, data.validation_files or another data.validation_one_in"
    )


def _write_units(
    folder: Path,
    source: Source,
    encoder: Encoder,
    threads: int,
    progress: bool,
    splits: Sequence[str],
    plan: dict[str, Any],
    journal: Journal,
) -> None:
    """Read and write the units that the journal does not list as finished."""
    left = plan["units"][journal.counts["units"] :]
    unit, committed = Counter[str](), time.monotonic()
    with ExitStack() as stack:
        writers = {split: SplitWriter(folder / split, encoder.vocab_size, journal.counts, stack) for split in SPLITS}
        report = stack.enter_context(_progress_bar(progress))
        stack.callback(lambda: journal.commit(writers.values()))  # at the end, and also when the build is interrupted
        for group in _encode(_documents(source, left, splits), encoder, threads):
            for item in group:
                if isinstance(item, UserError):
                    finished = journal.counts["units"]
                    hint = f"\nrun it again to continue after input {finished} of {len(plan['units'])}"
                    raise UserError(f"{item}{hint if finished else ''}") from item
                if isinstance(item, Counter):
                    journal.finish_unit(unit + item)
                    unit = Counter()
                else:
                    split = item.document.split
                    writers[split].write(item.ids, item.document.digest)
                    unit[f"{split} documents"] += 1
                    unit[f"{split} tokens"] += len(item.ids)
                    unit[f"{split} bytes"] += item.num_bytes
            if time.monotonic() - committed > COMMIT_SECONDS:
                journal.commit(writers.values())
                committed = time.monotonic()
            report([item for item in group if isinstance(item, Encoded)])


def _documents(source: Source, units: Sequence[str], splits: Sequence[str]) -> Iterator[Item]:
    for unit in units:
        skipped: Counter[str] = Counter()
        try:
            yield from (document for document in source.read(unit, skipped) if document.split in splits)
        except UserError as error:
            yield error
            return
        yield Counter({"units": 1} | {f"skipped: {reason}": count for reason, count in skipped.items()})


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
def _progress_bar(visible: bool) -> Iterator[Callable[[list[Encoded]], None]]:
    """Yield a function that adds a group of documents to a bar on standard error."""
    shown = "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
    columns = (TextColumn("preparing"), BarColumn(), TextColumn(shown), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task, sums = bar.add_task("", total=1.0, documents=0, tokens=0, speed=0.0), Counter[str]()

        def report(group: list[Encoded]) -> None:
            if visible and group:
                sums.update(documents=len(group), tokens=sum(len(encoded.ids) for encoded in group))
                sums["bytes"] += sum(encoded.num_bytes for encoded in group)
                speed, done = sums["bytes"] / 1e6 / (bar.tasks[0].elapsed or 1.0), group[-1].document.done
                bar.update(task, completed=done, documents=sums["documents"], tokens=sums["tokens"], speed=speed)

        yield report


def token_dtype(vocab_size: int) -> str:
    """Return the narrower of the two types on disk that holds every id: `<u2` or `<u4`."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def finished_units(folder: Path) -> int:
    """Return how many units of an interrupted build are finished."""
    return sum(line.get("units", 0) for line in _read_journal(folder)[1:])


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
