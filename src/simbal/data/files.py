"""Text from files: .txt, .jsonl (plain, .gz, .zst) and .parquet, local or behind URLs (`data=files`, `data=dclm`)."""

import codecs
import gzip
import json
import os
import re
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from simbal.data.sources import SPLITS, TRAIN, VALIDATION, Document, Source, split_of
from simbal.errors import UserError

EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
GOOD_PER_BAD = 1000  # records, with data.on_bad_record=skip
BLANK_LINES = re.compile(r"\n(?:[ \t\r\v\f]*\n)+")
ROWS = 1024  # Parquet rows decoded at once
CHUNK = 1 << 18  # bytes decompressed at once
MAX_ZSTD_WINDOW = 1 << 31  # bytes, as `zstd --ultra --long=31` writes
RETRY_SECONDS = (1.0, 2.0, 4.0)  # before each retry of a download
HTTP_TIMEOUTS = {"sock_connect": 10, "sock_read": 60}  # seconds
_Result = TypeVar("_Result")


class BadRecordError(ValueError):
    """A record or file without usable text; the message says why."""


class InputFile(NamedTuple):
    """A file to read."""

    split: str  # one of SPLITS
    location: str  # an absolute path or a URL
    size: int | None = None  # bytes; None: remote
    mtime: int | None = None  # ns; None: remote

    @property
    def path(self) -> str:
        """The location without the query of a web address."""
        return self.location.partition("?")[0] if _is_web(self.location) else self.location

    @property
    def extension(self) -> str:
        """The member of EXTENSIONS that the path ends in, or "" for another one."""
        return next((extension for extension in EXTENSIONS if self.path.lower().endswith(extension)), "")

    @property
    def is_url_glob(self) -> bool:
        """Whether the location is a URL with wildcards."""
        return self.size is None and any(sign in self.path for sign in ("*" if _is_web(self.location) else "*?["))


@dataclass(frozen=True)
class Files(Source):
    """Documents from paths, URLs and globs.

    Without `validation_files`, one document in `validation_one_in` is held out by its hash; with `holds_out_ends`, the
    last of `validation_one_in` equal parts of every document.
    """

    files: str | list[str]
    validation_files: str | list[str] | None
    text_key: str
    encoding: str
    txt_split: str
    on_bad_record: str
    validation_one_in: int
    cache_dir: str  # holds a copy of a remote file while it is read
    holds_out_ends: bool = False
    key: str = "data.files"  # of the config, for error messages

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the documents, and each file with its size and modification time."""
        keys = ("text_key", "encoding", "txt_split", "on_bad_record", "validation_one_in")
        files = [[*file] if file.mtime is not None else [file.split, file.location] for file in self._unexpanded]
        return {"files": files} | {key: getattr(self, key) for key in keys}

    def inputs(self, splits: Sequence[str] = SPLITS) -> list[str]:
        """Return the locations of the files in the order given, the matches of a glob sorted."""
        by_hash = not self.validation_files
        return [location for location, file in self._files.items() if by_hash or file.split in splits]

    def with_ends_held_out(self) -> "Files | None":
        """Return the source that holds out the end of each document, unless `validation_files` are given."""
        if self.validation_files or self.validation_one_in == 1:
            return None
        return replace(self, holds_out_ends=True)

    def read(self, name: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents of one file; count empty, changed and bad records in `skipped`."""
        file = self._files[name]
        with self._open(file) as opened:
            size = max(1, os.fstat(opened.fileno()).st_size)
            for number, text in enumerate(self._read_texts(opened, file, skipped)):
                if number % 16 == 0:  # tell() is a system call
                    progress = min(1.0, opened.tell() / size)
                content = _encode_utf8(text, skipped)
                if not content:
                    skipped["empty text"] += 1
                    continue
                for split, part in self._parts(content, file.split):
                    yield Document(split, part, progress)

    def _parts(self, content: bytes, split: str) -> list[tuple[str, bytes]]:
        """Return (split, content) of a document of a file of `split`, or of its two parts if the end is held out."""
        if self.holds_out_ends:
            return [*zip(SPLITS, cut_end(content, self.validation_one_in), strict=False)]
        return [(split if self.validation_files else split_of(content, self.validation_one_in), content)]

    def _open(self, file: InputFile) -> BinaryIO:
        if file.size is None:
            return download(file.location, self.cache_dir, self.key)
        try:
            return Path(file.location).open("rb")
        except OSError as error:
            raise UserError(f"{file.location} cannot be read: {error.strerror}") from None

    def _read_texts(self, opened: BinaryIO, file: InputFile, skipped: Counter[str]) -> Iterator[str]:
        """Yield the text of each record; reject or count bad records, according to `on_bad_record`."""
        kind, number, bad = "byte", 0, list[str]()
        try:
            if file.extension == ".txt":
                yield from self._read_txt(opened)
                return
            is_parquet = file.extension == ".parquet"
            kind = "row" if is_parquet else "line"
            records = read_parquet(opened, self.text_key) if is_parquet else read_lines(opened, file.extension)
            for number, record in enumerate(records, 1):
                if not is_parquet and not record.strip():  # a blank line
                    continue
                try:
                    yield self._decode(record) if is_parquet else self._parse_json(record)
                except BadRecordError as error:
                    bad.append(f"{file.location}, {kind} {number}: {error}")
                    if self.on_bad_record == "error":
                        raise UserError(bad[0]) from None
        except (BadRecordError, OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file.location} cannot be read after {kind} {number}: {error}") from None
        if len(bad) * GOOD_PER_BAD > number:
            limit = f"data.on_bad_record=skip skips at most 1 in {GOOD_PER_BAD}"
            raise UserError(f"{bad[0]}; {len(bad)} of {number} records are bad, but {limit}")
        skipped["bad record"] += len(bad)

    def _read_txt(self, opened: BinaryIO) -> Iterator[str]:
        """Yield the whole file, or each run of lines without a blank line."""
        text = self._decode(opened.read().removeprefix(codecs.BOM_UTF8))
        if self.txt_split == "file":
            yield text
            return
        for part in BLANK_LINES.split(f"\n{text}\n"):
            document = part.strip("\n").removesuffix("\r")
            if document:
                yield document

    def _parse_json(self, line: bytes) -> str:
        text = self._decode(line)
        try:
            record = json.loads(text)  # orjson rejects lone surrogates, which occur in web text
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"not JSON ({error})") from None
        if not isinstance(record, dict):
            raise BadRecordError(f"not a JSON object but {type(record).__name__}")
        value = record.get(self.text_key)
        if not isinstance(value, str):
            raise BadRecordError(f"no text under {self.text_key!r} (keys: {_first_names(record)}): set data.text_key")
        return value

    def _decode(self, content: bytes | None) -> str:
        if content is None:
            raise BadRecordError(f"{self.text_key!r} is null")
        try:
            return content.decode(self.encoding)
        except (UnicodeDecodeError, LookupError) as error:
            raise BadRecordError(f"{error}: set data.encoding (latin-1?) or convert the file") from None

    @cached_property
    def _files(self) -> dict[str, InputFile]:
        """All files by location, with globs of URLs expanded."""
        files: dict[str, InputFile] = {}
        for given in self._unexpanded:
            urls = expand_url(given.location, self.key) if given.is_url_glob else [given.location]
            for url in urls:
                if url in files:
                    raise UserError(f"{self.key}: {url} is listed twice")
                files[url] = given._replace(location=url)
        _check_extensions(files.values())
        return files

    @cached_property
    def _unexpanded(self) -> list[InputFile]:
        """All files; globs of URLs are not expanded, because that needs a network."""
        if not self.files:
            raise UserError(f"{self.key} is empty: set it to a path, a URL, a glob or a list of them")
        validation_key = "data.validation_files" if self.key == "data.files" else self.key
        files = find_files(TRAIN, self.files, self.key)
        files += find_files(VALIDATION, self.validation_files or [], validation_key)
        _check_extensions(file for file in files if not file.is_url_glob)
        return files


def open_dclm(data: Any) -> Files:
    """Return the source of `num_shards` shards of DCLM from `first_shard`, and one more shard for validation.

    Common Crawl's terms of use apply to the text. DCLM deprecates this download, because some of its files are broken
    (mlfoundations/dclm issue 110).
    """
    shards = [*range(data.first_shard, data.first_shard + data.num_shards), data.validation_shard]
    try:
        urls = [data.location.format(shard=shard) for shard in shards]
    except (ValueError, LookupError):
        urls = []
    if "{shard" not in data.location or not urls:
        raise UserError(
            f"data.location={data.location} must contain {{shard}}, or {{shard:08d}} for eight digits, and no other "
            "braces"
        )
    same = {key: getattr(data, key) for key in ("text_key", "on_bad_record", "validation_one_in", "cache_dir")}
    return Files(urls[:-1], urls[-1:], encoding="utf-8", txt_split="file", key="data.location", **same)


def find_files(split: str, patterns: str | list[str], key: str) -> list[InputFile]:
    """Return the files that match a path, a URL, a glob or a list of them, the value of a config key.

    Globs of URLs are returned unexpanded.
    """
    files = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if "://" in pattern and not pattern.startswith("file://"):
            files.append(InputFile(split, pattern))
            continue
        path = os.path.abspath(os.path.expanduser(pattern.removeprefix("file://")))  # noqa: PTH100, PTH111
        matches = [path] if os.path.exists(path) else sorted(glob(path, recursive=True))  # noqa: PTH110, PTH207
        if not matches:
            raise UserError(f"{key}: no file matches {pattern}")
        for match in matches:
            if os.path.isdir(match):  # noqa: PTH112 - a Path takes longer to create than its file to look up
                raise UserError(f"{key}: {match} is a folder: name its files, as in {match}/*.jsonl")
            status = os.stat(match)  # noqa: PTH116
            files.append(InputFile(split, match, status.st_size, status.st_mtime_ns))
    return files


def _check_extensions(files: Iterable[InputFile]) -> None:
    for file in files:
        if not file.extension:
            raise UserError(f"{file.location}: the name must end in one of {' '.join(EXTENSIONS)}")


def cut_end(content: bytes, parts: int) -> tuple[bytes, ...]:
    """Return a text without the last of `parts` equal parts, and that part unless it is shorter than a character."""
    position = len(content) - len(content) // parts
    while position < len(content) and content[position] & 0xC0 == 0x80:  # inside a character
        position += 1
    return (content[:position], content[position:]) if position < len(content) else (content,)


def read_lines(file: BinaryIO, extension: str) -> Iterator[bytes]:
    r"""Yield the lines of a .jsonl, .jsonl.gz or .jsonl.zst; only `\n` ends a line."""
    lines: Iterable[bytes] = file
    if extension == ".jsonl.gz":
        lines = cast(Iterable[bytes], gzip.GzipFile(fileobj=file))
    elif extension == ".jsonl.zst":
        lines = _split_lines(_decompress_zstd(file))
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(codecs.BOM_UTF8)


def _decompress_zstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all frames. The readers of fsspec and zstandard accept a truncated file without an error."""
    import zstandard

    frame = None
    try:
        while piece := file.read(CHUNK):
            while piece:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj()
                yield frame.decompress(piece)
                piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise BadRecordError(error) from None
    if frame:
        raise BadRecordError("the file is truncated")


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []  # parts of a line longer than a chunk
    for chunk in chunks:
        head, *rest = chunk.split(b"\n")
        for following in rest:
            yield b"".join([*pending, head])
            head, pending = following, []
        pending.append(head)
    yield b"".join(pending)


def read_parquet(file: BinaryIO, column: str) -> Iterator[Any]:
    """Yield the values of a column of strings or bytes as bytes; not every writer of Parquet ensures valid UTF-8."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(".parquet needs pyarrow, which is not installed: pip install 'simbal[parquet]'") from None
    try:
        table = ParquetFile(file)
        if column not in table.schema_arrow.names:
            columns = _first_names(table.schema_arrow.names)
            raise BadRecordError(f"no column {column!r} (columns: {columns}): set data.text_key")
        for batch in table.iter_batches(ROWS, columns=[column], use_threads=False):
            values = batch.column(0)
            values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
            yield from values.cast(pa.large_binary()).to_pylist()
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise BadRecordError(f"column {column!r} must contain text: set data.text_key") from None
    except pa.ArrowException as error:
        raise BadRecordError(" ".join(str(error).split())[:200]) from None


def _encode_utf8(text: str, skipped: Counter[str]) -> bytes:
    """Return the text in UTF-8; lone surrogates, which JSON allows, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        skipped["surrogates replaced"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _first_names(names: Iterable[Any]) -> str:
    return ", ".join(repr(str(name)[:60]) for name in [*names][:8]) or "none"


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def expand_url(pattern: str, key: str) -> list[str]:
    """Return the URLs of the files that match a glob, sorted."""

    def find(filesystem: Any, path: str) -> list[str]:
        matches = filesystem.glob(path, detail=True)
        return sorted(filesystem.unstrip_protocol(name) for name, info in matches.items() if info["type"] == "file")

    if urls := _retry(pattern, key, find):
        return urls
    raise UserError(f"{key}: no file matches {pattern}")


def download(url: str, folder: str, key: str) -> BinaryIO:
    """Return a temporary copy of a remote file in `folder`; a lost connection is retried from the start."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115 - the caller closes and thereby deletes it

    def copy(filesystem: Any, path: str) -> None:
        filesystem.get_file(path, file.name)
        expected, received = filesystem.info(path).get("size"), Path(file.name).stat().st_size
        if expected not in (None, received):
            raise OSError(f"received {received} of {expected} bytes")

    try:
        _retry(url, key, copy)
    except UserError:
        file.close()
        raise
    return cast(BinaryIO, file)


def _retry(url: str, key: str, action: Callable[[Any, str], _Result]) -> _Result:
    """Call `action` with fsspec's filesystem and the path of `url`; retry unless the next attempt would fail too."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if _is_web(url):
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, **HTTP_TIMEOUTS)  # aiohttp's default is five minutes per file
        options = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": timeout}}
    for pause in (*RETRY_SECONDS, None):
        try:
            filesystem, path = url_to_fs(url, **options)
            filesystem.invalidate_cache()
            return action(filesystem, path)
        except Exception as error:  # each filesystem has its own errors
            if pause is None or isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError):
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise UserError(f"{key}: cannot read {url} ({reason}): download the file and set its path") from error
            time.sleep(pause)
    raise AssertionError
