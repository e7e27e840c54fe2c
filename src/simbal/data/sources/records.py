"""Texts of one file: .jsonl (plain, .gz, .zst), .parquet or .txt. A record without text is a `BadRecord`."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, BinaryIO, NamedTuple

from simbal.errors import UserError

EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
CHUNK = 1 << 18  # bytes decompressed and split into lines at once
ROWS = 1024  # of Parquet, decoded at once
SHOWN_NAMES = 8  # of a record's keys or a table's columns
LARGEST_WINDOW = 1 << 31  # bytes, as `zstd --ultra --long=31` writes
BLANK = " \t\r\n\v\f"


@dataclass(frozen=True)
class Format:
    """How the files of a source are read."""

    text_key: str  # of a JSON record, or a column of Parquet
    encoding: str  # of .txt and .jsonl
    txt_split: str  # file | blank_lines: what one document of a .txt is


class BadRecord(NamedTuple):
    """A record that holds no text."""

    place: str  # in the file: line 3
    reason: str  # in few words, to be counted
    problem: str  # as a clause of an error message


class BrokenFileError(Exception):
    """The file cannot be read further."""


def read_texts(file: BinaryIO, extension: str, form: Format) -> Iterator[str | BadRecord]:
    """Yield the text of each record.

    Raises:
        BrokenFileError: where the file stops making sense.
        UserError: .parquet without pyarrow.
    """
    if extension == ".parquet":
        return _read_parquet(file, form)
    return _read_txt(file, form) if extension == ".txt" else _read_jsonl(file, extension, form)


def _read_jsonl(file: BinaryIO, extension: str, form: Format) -> Iterator[str | BadRecord]:
    number = 0
    try:
        for number, line in enumerate(_lines(_decompressed(file, extension)), 1):
            record = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if record.strip():
                yield _text_of_json(record, form, f"line {number}")
    except BrokenFileError as error:
        raise BrokenFileError(f"line {number + 1}: {error}") from None


def _text_of_json(line: bytes, form: Format, place: str) -> str | BadRecord:
    text = _decoded(line, form.encoding, place)
    if isinstance(text, BadRecord):
        return text
    try:
        record = json.loads(text)  # not orjson, which refuses lone surrogates, as web text has them
    except (ValueError, RecursionError) as error:
        return BadRecord(place, "not JSON", f"this is not JSON ({error})")
    if not isinstance(record, dict):
        return BadRecord(place, "no JSON object", f"a record must be a JSON object, not {type(record).__name__}")
    if form.text_key not in record:
        problem = f"the record has no key {form.text_key!r} (its keys: {_few(record)}): set data.text_key"
        return BadRecord(place, "no text key", problem)
    value = record[form.text_key]
    if isinstance(value, str):
        return value
    kind = "null" if value is None else type(value).__name__
    return BadRecord(place, f"{kind} as text", f"{form.text_key!r} must hold text, not {kind}")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield lines without their `\n`; `str.splitlines` would also break at U+2028 and U+0085."""
    pending: list[bytes] = []  # of a line longer than a chunk
    for chunk in chunks:
        head, *rest = chunk.split(b"\n")
        for following in rest:
            yield b"".join([*pending, head])
            head, pending = following, []
        pending.append(head)
    yield b"".join(pending)


def _decompressed(file: BinaryIO, extension: str) -> Iterator[bytes]:
    if extension == ".jsonl.zst":
        yield from _unzstd(file)
        return
    try:
        reader: Any = gzip.GzipFile(fileobj=file) if extension == ".jsonl.gz" else file
        while chunk := reader.read1(CHUNK):  # what comes before damage is read
            yield chunk
    except EOFError:
        raise BrokenFileError("the gzip file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BrokenFileError(f"this is not gzip ({error})") from None


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all frames. fsspec's and zstandard's file objects take a truncated file for a whole one."""
    import zstandard

    frame = None
    try:
        while piece := file.read(CHUNK):
            while piece:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
                yield frame.decompress(piece)
                piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise BrokenFileError(f"this is not zstd ({error})") from None
    if frame:
        raise BrokenFileError("the zstd file is cut short")


def _read_txt(file: BinaryIO, form: Format) -> Iterator[str | BadRecord]:
    """Yield the whole file, or each run of lines that are not blank, without the line ends around it."""
    text = _decoded(file.read(), form.encoding, "")
    if isinstance(text, BadRecord) or form.txt_split == "file":
        yield text
        return
    for is_blank, run in groupby(text.split("\n"), lambda line: not line.strip(BLANK)):
        if not is_blank:
            yield "\n".join(run).removesuffix("\r")


def _decoded(content: bytes, encoding: str, place: str) -> str | BadRecord:
    """Return the text of `content`, without the byte order mark of a whole UTF-8 file."""
    try:
        return (content if place else content.removeprefix(codecs.BOM_UTF8)).decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not {encoding}: set data.encoding (latin-1?) or convert the file"
        return BadRecord(place, f"not {encoding}", problem)


def _read_parquet(file: BinaryIO, form: Format) -> Iterator[str | BadRecord]:
    """Yield the text of each row. Columns are read as bytes, since nothing makes a writer put valid UTF-8 into text."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(".parquet needs pyarrow, which is not installed: pip install 'simbal[parquet]'") from None
    key, number = form.text_key, 0
    try:
        table = ParquetFile(file)
        if key not in table.schema_arrow.names:  # pyarrow would return batches without columns
            columns = _few(table.schema_arrow.names)
            raise BrokenFileError(f"no column {key!r} (its columns: {columns}): set data.text_key")
        kind = table.schema_arrow.field(key).type
        for batch in table.iter_batches(ROWS, columns=[key], use_threads=False):
            column = batch.column(0)
            column = column.dictionary_decode() if pa.types.is_dictionary(kind) else column
            for value in column.cast(pa.large_binary()).to_pylist():
                number += 1
                yield _text_of_row(value, form, f"record {number}")
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise BrokenFileError(f"column {key!r} must hold text, not {kind}: set data.text_key") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        reason = " ".join(str(error).split())[:200]
        raise BrokenFileError(f"after record {number}: this is not parquet, or damaged ({reason})") from None


def _text_of_row(value: bytes | None, form: Format, place: str) -> str | BadRecord:
    if value is None:
        return BadRecord(place, "null as text", f"{form.text_key!r} must hold text, not null")
    return _decoded(value, form.encoding, place)


def _few(names: Iterable[Any]) -> str:
    shown = [repr(str(name)[:60]) for name in islice(names, SHOWN_NAMES)]
    return ", ".join(shown) or "none"
