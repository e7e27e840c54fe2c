"""Files of text as documents: what a source does with its inputs, wherever they lie and whatever their form."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from simbal.data.document import Document, digest_of, split_of
from simbal.data.inputs import Input, extension_of
from simbal.data.lines import BrokenFileError
from simbal.data.parquet import read_parquet
from simbal.data.plain_text import read_paragraphs, read_whole
from simbal.data.records import BadRecord, Format, Record, read_json
from simbal.errors import UserError

BAD_PER = 1000  # one bad record in so many may be left out


@dataclass(frozen=True)
class Corpus:
    """Reads inputs one by one.

    Args:
        inputs: all of them; each is a unit, named by its path or URL.
        validation_one_in: hold out one document in so many by its hash; None: an input's own split decides.
        on_bad_record: error | skip.
        cache_dir: where a remote file is while it is read.
    """

    inputs: list[Input]
    format: Format
    on_bad_record: str
    validation_one_in: int | None
    cache_dir: Path

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """The documents of one input.

        Raises:
            UserError: the file, the line, record or byte where it stops making sense, and why.
            UnreachableError: for a remote file that cannot be fetched.
        """
        at = [item.name for item in self.inputs].index(unit)
        # as parts of all; the size of a remote file is not known before it is its turn
        sizes = [item.size for item in self.inputs]
        weights = [1 if None in sizes else size or 0 for size in sizes]
        before, total = sum(weights[:at]), sum(weights)
        empty = True
        with self.inputs[at].open(self.cache_dir) as file:
            for text, share in self._good(_read(file, unit, self.format), unit, skipped):
                if not text:
                    skipped["empty text"] += 1
                    continue
                content, empty = _utf8(text, skipped), False
                digest = digest_of(content)
                one_in = self.validation_one_in
                split = split_of(digest, one_in) if one_in else self.inputs[at].split
                yield Document(split, unit, content, digest, (before + share * weights[at]) / total)
        if empty:
            raise UserError(f"{unit}: the file is empty or holds no text")

    def _good(self, records: Iterator[Record], unit: str, skipped: Counter[str]) -> Iterator[tuple[str, float]]:
        """The records that hold a text; the others are refused or counted, as `on_bad_record` says."""
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
            raise UserError(_too_many(unit, bad, number, first))


def _too_many(unit: str, bad: int, number: int, first: BadRecord) -> str:
    return (
        f"{unit}, {first.place}: {first.problem}; it is the first of {bad} bad records among {number}, "
        f"and data.on_bad_record=skip leaves out at most 1 in {BAD_PER}"
    )


def _read(file: BinaryIO, name: str, rules: Format) -> Iterator[Record]:
    """The records of a file, by its extension."""
    extension = extension_of(name)
    try:
        if extension == ".parquet":
            yield from read_parquet(file, rules)
        elif extension == ".txt":
            yield from (read_whole if rules.txt_split == "file" else read_paragraphs)(file, rules)
        else:
            yield from read_json(file, extension, rules)
    except BrokenFileError as error:
        place = f", {error.place}" if error.place else ""
        raise UserError(f"{name}{place}: {error}") from None
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None


def _utf8(text: str, skipped: Counter[str]) -> bytes:
    """Lone surrogates, which JSON can write but UTF-8 cannot, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        skipped["surrogates replaced"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
