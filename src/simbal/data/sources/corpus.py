"""Documents from files of text, wherever they lie and whatever their form, and the readers of .parquet and .txt.

`Corpus` reads each input by its extension, refuses or counts bad records, and assigns the splits.
"""

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from simbal.data.document import SPLITS, Document, digest_of, split_of
from simbal.data.sources.inputs import Input, extension_of
from simbal.data.sources.records import (
    BadRecord,
    BrokenFileError,
    Format,
    Record,
    decoded,
    few,
    read_json,
    read_lines,
    share_read,
)
from simbal.data.sources.remote import UnreachableError
from simbal.errors import UserError

BAD_PER = 1000  # one bad record in so many may be left out
ROWS = 1024  # decoded at once
BUFFER = 1 << 20  # bytes of the file that are read at once


@dataclass(frozen=True)
class Corpus:
    """A list of inputs that are read one by one.

    Args:
        inputs: all of them; each is a unit, named by its path or URL.
        format: how the files are to be understood.
        on_bad_record: error | skip.
        validation_one_in: hold out one document in so many by its hash; None: an input's own split decides.
        cache_dir: the folder of a remote file's copy while it is read.
        ends: hold out the last of so many equal parts of every document, in place of one document in so many.
    """

    inputs: list[Input]
    format: Format
    on_bad_record: str
    validation_one_in: int | None
    cache_dir: Path
    ends: bool = False

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents of one input; texts that are empty or changed are counted in `skipped`.

        Raises:
            UserError: the file, the line, record or byte where it stops making sense, and why.
            UnreachableError: for a remote file that cannot be fetched.
        """
        at = [item.name for item in self.inputs].index(unit)
        # weights are shares of the whole; a remote file's size is not known before its turn
        sizes = [item.size for item in self.inputs]
        weights = [1 if None in sizes else size or 0 for size in sizes]
        before, total = sum(weights[:at]), sum(weights)
        empty = True
        with self.inputs[at].open(self.cache_dir) as file:
            for text, share in self._good(_read(file, self.inputs[at], self.format), unit, skipped):
                if not text:
                    skipped["empty text"] += 1
                    continue
                content, empty = _utf8(text, skipped), False
                for split, part, digest in self._parts(content, self.inputs[at].split):
                    yield Document(split, unit, part, digest, (before + share * weights[at]) / total)
        if empty:
            raise UserError(f"{unit}: the file is empty or holds no text")

    def _parts(self, content: bytes, split: str) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield the parts of a document, each with its split and its digest; `split` is that of the input."""
        one_in = self.validation_one_in
        parts = _cut(content, one_in) if one_in and self.ends else (content,)
        for part, own in zip(parts, SPLITS, strict=False):
            digest = digest_of(part)
            yield own if self.ends else split_of(digest, one_in) if one_in else split, part, digest

    def _good(self, records: Iterator[Record], unit: str, skipped: Counter[str]) -> Iterator[tuple[str, float]]:
        """Yield the records that hold a text; the others are refused or counted, as `on_bad_record` says."""
        first, bad, number = None, 0, 0
        for text, share in records:
            number += 1
            if isinstance(text, str):
                yield text, share
            elif self.on_bad_record == "error":
                raise UserError(f"{unit}, {text.place}: {text.problem}")
            else:
                first, bad = first or text, bad + 1
                skipped[f"bad record: {text.reason}"] += 1
        if first and bad * BAD_PER > number:
            raise UserError(
                f"{unit}, {first.place}: {first.problem}; it is the first of {bad} bad records among {number}, "
                f"and data.on_bad_record=skip leaves out at most 1 in {BAD_PER}"
            )


class FileSource(ABC):
    """A source whose units are the inputs of a corpus."""

    @property
    @abstractmethod
    def corpus(self) -> Corpus:
        """All inputs, and how they are read."""

    @abstractmethod
    def by_hand(self, unit: str) -> str:
        """Return what the user can do where the network does not give a unit."""

    def units(self) -> list[str]:
        """Return the names of the inputs, in order."""
        return [item.name for item in self.corpus.inputs]

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents of an input.

        Raises:
            UserError: for the first thing in it that makes no sense, with its position, or if it cannot be had.
        """
        try:
            yield from self.corpus.read(unit, skipped)
        except UnreachableError as error:
            raise UserError(f"{unit} cannot be fetched ({error}){self.by_hand(unit)}") from None


def _read(file: BinaryIO, item: Input, rules: Format) -> Iterator[Record]:
    """Yield the records of a file, by the reader for its extension."""
    extension = extension_of(item.location)
    try:
        if extension == ".parquet":
            yield from read_parquet(file, rules)
        elif extension == ".txt":
            yield from (read_whole if rules.txt_split == "file" else read_paragraphs)(file, rules)
        else:
            yield from read_json(file, extension, rules)
    except BrokenFileError as error:
        place = f", {error.place}" if error.place else ""
        raise UserError(f"{item.name}{place}: {error}") from None
    except OSError as error:
        raise UserError(f"{item.name}: {error.strerror}") from None


def _cut(content: bytes, parts: int) -> tuple[bytes, ...]:
    """Return a text without the last of so many equal parts, and that part, if it has a letter."""
    place = len(content) - len(content) // parts
    while place < len(content) and content[place] & 0xC0 == 0x80:  # within a letter
        place += 1
    return (content[:place], content[place:]) if place < len(content) else (content,)


def _utf8(text: str, skipped: Counter[str]) -> bytes:
    """Return the text in UTF-8; lone surrogates, which JSON can write but UTF-8 cannot, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        skipped["surrogates replaced"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def read_parquet(file: BinaryIO, rules: Format) -> Iterator[Record]:
    """Yield the text of each row; binary columns are taken for text in `encoding`, which must be true of every row.

    Raises:
        BrokenFileError: for a file that is cut short or damaged, or has no such column of text.
        UserError: without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            ".parquet needs the package pyarrow, which is not installed: pip install 'simbal[parquet]'"
        ) from None
    number = 0
    try:
        table = ParquetFile(file, buffer_size=BUFFER)
        encoding = _encoding_of(table.schema_arrow, rules)
        rows = table.metadata.num_rows
        for batch in table.iter_batches(ROWS, columns=[rules.text_key], use_threads=False):
            for value in _binary(batch.column(0)):
                number += 1
                yield _text(value.as_py(), encoding, rules.text_key, f"record {number}"), number / rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        reason = " ".join(str(error).split())[:200]
        where = f"record {number + 1}" if number else None
        raise BrokenFileError(f"this is not parquet, or damaged ({reason})", where) from None


def _encoding_of(schema: Any, rules: Format) -> str:
    """Return the encoding of the bytes in the text column; `BrokenFileError` if there is no such column of text.

    The schema is looked at first, as pyarrow reads a missing column as no columns at all.
    """
    from pyarrow import types

    key = rules.text_key
    if schema.names.count(key) != 1:
        raise BrokenFileError(f"no column {key!r}, or more than one (there is {few(schema.names)}): set data.text_key")
    kind = schema.field(key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "utf-8"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return rules.encoding
    raise BrokenFileError(f"column {key!r} must hold text, not {kind}: set data.text_key")


def _binary(column: Any) -> Any:
    """Return a column as one of bytes.

    It is not read as text: nothing makes a writer put valid UTF-8 into a column of text, and pyarrow would raise for
    all.
    """
    import pyarrow as pa

    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return plain.cast(pa.large_binary())


def _text(value: bytes | None, encoding: str, key: str, place: str) -> str | BadRecord:
    if value is None:
        return BadRecord("null as text", place, f"{key!r} must hold text, not null")
    return decoded(value, encoding, place)


def read_whole(file: BinaryIO, rules: Format) -> Iterator[Record]:
    """Yield the one document of a file."""
    yield _decoded(file.read(), 0, rules), 1.0


def read_paragraphs(file: BinaryIO, rules: Format) -> Iterator[Record]:
    """Yield runs of lines that are not blank, without the line ends around them."""
    if not rules.keeps_line_ends:
        raise BrokenFileError(f"data.encoding={rules.encoding} needs data.txt_split=file, or convert the file to utf-8")
    run = bytearray()  # its lines, each with its end: far smaller than a list of them
    start = position = 0  # of the run and of the line, in bytes
    for line in read_lines(file, ".txt"):
        if line.strip() and line != codecs.BOM_UTF8:
            start = start if run else position
            run += line + b"\n"
        elif run:
            yield _decoded(_whole(run), start, rules), share_read(file)
            run = bytearray()
        position += len(line) + 1
    if run:
        yield _decoded(_whole(run), start, rules), 1.0


def _whole(run: bytearray) -> bytes:
    return bytes(run).removesuffix(b"\n").removesuffix(b"\r")


def _decoded(content: bytes, start: int, rules: Format) -> str | BadRecord:
    """Return the text of a document that begins at byte `start` of its file."""
    text = content.removeprefix(codecs.BOM_UTF8) if start == 0 else content
    return decoded(text, rules.encoding, "", start + len(content) - len(text))
