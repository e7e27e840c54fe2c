"""The texts of one file: a .txt is one text, a line of .jsonl (plain, .gz or .zst) is a record with one."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from simbal.data.lines import BrokenFileError, read_lines
from simbal.errors import UserError


def read_texts(path: Path, text_key: str, encoding: str) -> Iterator[tuple[str, int]]:
    """Each text, as it was written, with the number of bytes of the file read so far.

    Raises:
        UserError: the file, the line or byte where it stops making sense, and why.
    """
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".txt":
                yield _whole(path, file.read(), encoding), file.tell()
                return
            number = 0
            try:
                for number, line in enumerate(read_lines(file, path.suffix.lower()), 1):
                    record = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if record.strip():
                        yield _text(record, text_key, encoding, f"{path}, line {number}"), file.tell()
            except BrokenFileError as error:
                raise UserError(f"{path}, line {number + 1}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _whole(path: Path, content: bytes, encoding: str) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode(encoding)
    except UnicodeDecodeError as error:
        at = error.start + len(content) - len(error.object)
        raise UserError(f"{path}, byte {at}: not {encoding}: set data.encoding (latin-1?) or convert it") from None


def _text(line: bytes, text_key: str, encoding: str, where: str) -> str:
    try:
        record = json.loads(line.decode(encoding))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} of it is not {encoding}: set data.encoding (latin-1?) or convert the file"
        ) from None
    except RecursionError:
        raise UserError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where}: this is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a record must be a JSON object, not {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise UserError(f"{where}: no key {text_key!r} in the record (its keys: {keys}): set data.text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_key!r} must hold text, not {type(text).__name__}")
    return text
