"""The texts of one file: a line of .jsonl (plain, .gz or .zst) is a record with one; .txt and .parquet have their own.

A record that gives no text is a `BadRecord`, to be refused or left out; a broken file always ends the reading.
"""

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from simbal.data.lines import BrokenFileError, read_lines
from simbal.errors import UserError

NO_TEXT = ("undefined", "idna", "punycode", "unicode-escape", "raw-unicode-escape")  # Python's own, for other things


@dataclass(frozen=True)
class Format:
    """How a file is to be understood."""

    text_key: str = "text"  # of a JSON record, or a column
    encoding: str = "utf-8"
    txt_split: str = "file"  # file | blank_lines: what one document of a .txt is

    def check(self) -> None:
        """Raise `UserError` for what is no encoding of text."""
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
    """A record without a text to take."""

    reason: str  # a few words, to count it under
    place: str  # in the file: line 3
    problem: str  # the whole sentence, for people


Record = tuple[str | BadRecord, float]  # with the share of the file that has been read, 0 to 1


def not_encoded(place: str, what: str, encoding: str) -> BadRecord:
    """For bytes that are not in `encoding`."""
    advice = "set data.encoding (latin-1?) or convert the file"
    return BadRecord(f"not {encoding}", place, f"{what}not {encoding}: {advice}")


def share_read(file: BinaryIO) -> float:
    """Of the file's bytes, 0 to 1."""
    return min(1.0, file.tell() / max(1, os.fstat(file.fileno()).st_size))


def read_json(file: BinaryIO, extension: str, rules: Format) -> Iterator[Record]:
    """The text of each line that is not blank, as it was written.

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
    try:
        record = json.loads(line.decode(rules.encoding))
    except UnicodeDecodeError as error:
        return not_encoded(place, f"byte {error.start} of it is ", rules.encoding)
    except RecursionError:
        return BadRecord("nested too deeply", place, "the JSON is nested too deeply")
    except ValueError as error:
        return BadRecord("not JSON", place, f"this is not JSON ({error})")
    return _member(record, rules.text_key, place)


def _member(record: object, key: str, place: str) -> str | BadRecord:
    if not isinstance(record, dict):
        return BadRecord("no JSON object", place, f"a record must be a JSON object, not {_kind(record)}")
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        return BadRecord("no text key", place, f"no key {key!r} in the record (its keys: {keys}): set data.text_key")
    text = record[key]
    if isinstance(text, str):
        return text
    return BadRecord(f"{_kind(text)} as text", place, f"{key!r} must hold text, not {_kind(text)}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
