"""The records of one file: lines of .jsonl (plain, .gz or .zst), and what .txt and .parquet share.

A record that gives no text is a `BadRecord`, to be refused or left out; a broken file always ends the reading.
"""

import codecs
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import zstandard

from simbal.errors import UserError

MOST_NAMES, LONGEST_NAME = 20, 60  # of the keys of a record that are shown, and characters of each
NO_TEXT = ("undefined", "idna", "punycode", "unicode-escape", "raw-unicode-escape")  # Python's own, for other things
CHUNK = 1 << 18  # bytes read, and looked through for line ends, at once
LARGEST_WINDOW = 1 << 31  # bytes, as `zstd --ultra --long=31` writes: such a file takes that much memory to read


@dataclass(frozen=True)
class Format:
    """The form of a source's files: the key of the text, its encoding, and what a document of a .txt is."""

    text_key: str = "text"  # of a JSON record, or a column
    encoding: str = "utf-8"
    txt_split: str = "file"  # file | blank_lines: what one document of a .txt is

    def check(self) -> None:
        """Raise `UserError` if `encoding` is no encoding of text."""
        try:
            name = codecs.lookup(self.encoding).name
            "a".encode(self.encoding)  # hex, rot13 and their like are no encodings of text
        except (LookupError, ValueError):
            name = NO_TEXT[0]
        if name in NO_TEXT:
            raise UserError(f"data.encoding={self.encoding} is not an encoding of Python: try utf-8")

    @property
    def keeps_line_ends(self) -> bool:
        """Whether a file can be cut at the byte `\\n` before it is decoded; not in UTF-16 and UTF-32."""
        try:
            return b'\n{"'.decode(self.encoding) == '\n{"'
        except UnicodeDecodeError:
            return False


class BadRecord(NamedTuple):
    """A record from which no text can be taken."""

    reason: str  # a few words, to count it under
    place: str  # in the file: line 3
    problem: str  # the whole sentence, for people


Record = tuple[str | BadRecord, float]  # with the share of the file that has been read, 0 to 1


class BrokenFileError(Exception):
    """The file cannot be read further; `place` says from where on, if that is known."""

    def __init__(self, reason: str, place: str | None = None) -> None:
        super().__init__(reason)
        self.place = place


def decoded(content: bytes, encoding: str, place: str, start: int | None = None) -> str | BadRecord:
    """Return the text of bytes in `encoding`, or the bad record for bytes that are not.

    It names the byte as one of the record at `place`; with `start`, the position of `content`, as one of the file.
    """
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        where = place if start is None else f"byte {start + error.start}"
        what = f"byte {error.start} of it is " if start is None else ""
        advice = "set data.encoding (latin-1?) or convert the file"
        return BadRecord(f"not {encoding}", where, f"{what}not {encoding}: {advice}")


def share_read(file: BinaryIO) -> float:
    """Return the share of the file's bytes that has been read, 0 to 1."""
    return min(1.0, file.tell() / max(1, os.fstat(file.fileno()).st_size))


def read_json(file: BinaryIO, extension: str, rules: Format) -> Iterator[Record]:
    """Yield the text of each line that is not blank, as it was written.

    Raises:
        BrokenFileError: where the file stops making sense.
    """
    if not rules.keeps_line_ends:
        raise BrokenFileError(f"data.encoding={rules.encoding} is for .txt only: convert the file to utf-8")
    number = 0
    try:
        for number, line in enumerate(read_lines(file, extension), 1):
            record = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if record.strip():
                yield _text(record, rules, f"line {number}"), share_read(file)
    except BrokenFileError as error:
        raise BrokenFileError(str(error), f"line {number + 1}") from None


def _text(line: bytes, rules: Format, place: str) -> str | BadRecord:
    text = decoded(line, rules.encoding, place)
    if isinstance(text, BadRecord):
        return text
    try:
        record = json.loads(text)
    except ValueError as error:
        return BadRecord("not JSON", place, f"this is not JSON ({error})")
    return _member(record, rules.text_key, place)


def _member(record: object, key: str, place: str) -> str | BadRecord:
    if not isinstance(record, dict):
        return BadRecord("no JSON object", place, f"a record must be a JSON object, not {_kind(record)}")
    if key not in record:
        return BadRecord(
            "no text key", place, f"no key {key!r} in the record (its keys: {few(record)}): set data.text_key"
        )
    text = record[key]
    if isinstance(text, str):
        return text
    return BadRecord(f"{_kind(text)} as text", place, f"{key!r} must hold text, not {_kind(text)}")


def few(names: Iterable[str]) -> str:
    """Return the first names, quoted and joined for a sentence; `none` if there are none."""
    shown = [repr(name[:LONGEST_NAME]) for name in islice(names, MOST_NAMES + 1)]
    return ", ".join([*shown[:MOST_NAMES], "..."] if len(shown) > MOST_NAMES else shown) or "none"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def read_lines(file: BinaryIO, extension: str) -> Iterator[bytes]:
    """Yield lines without their `\\n`, the only separator: `str.splitlines` would also break at U+2028 and U+0085.

    Args:
        file: the file, opened for bytes.
        extension: .jsonl.gz, .jsonl.zst or anything else for a plain file.

    Raises:
        BrokenFileError: after the last whole line of a truncated or damaged file.
    """
    pending: list[bytes] = []  # of a line that is longer than a chunk
    for unpacked in READERS.get(extension, _plain)(file):
        head, *rest = unpacked.split(b"\n")
        for following in rest:
            pending.append(head)
            yield b"".join(pending)
            head, pending = following, []
        pending.append(head)
    yield b"".join(pending)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _packed(file: BinaryIO, kind: str, decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the unpacked bytes of all members or frames, one after the other; `BrokenFileError` for a truncated file.

    File objects would take a truncated zstd file for a complete one.
    """
    member = None
    try:
        while piece := file.read(CHUNK):
            while piece:
                member = member or decompressor()  # zlib's and zstandard's have one interface
                yield member.decompress(piece)
                piece = member.unused_data if member.eof else b""
                member = None if member.eof else member
    except (zlib.error, zstandard.ZstdError) as error:
        raise BrokenFileError(f"this is not {kind} ({error})") from None
    if member:
        raise BrokenFileError(f"the {kind} file is cut short")


def _gzip_member() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: with the header and checksum of gzip


def _zstd_frame() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()


READERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".jsonl.gz": partial(_packed, kind="gzip", decompressor=_gzip_member),
    ".jsonl.zst": partial(_packed, kind="zstd", decompressor=_zstd_frame),
}
