"""The documents of a .txt: the whole file, or each run of lines between blank ones."""

import codecs
import os
from collections.abc import Iterator
from typing import BinaryIO

from simbal.data.lines import LONGEST, BrokenFileError, read_lines
from simbal.data.records import BadRecord, Format, Record, not_encoded, share_read


def read_whole(file: BinaryIO, rules: Format) -> Iterator[Record]:
    """The one document of a file, which is held in memory.

    Raises:
        BrokenFileError: for a file that is too large for that.
    """
    if os.fstat(file.fileno()).st_size > LONGEST:
        raise BrokenFileError(
            f"the file is longer than {LONGEST >> 20} MiB, too long for one document: set data.txt_split=blank_lines, "
            "which makes one of each run of lines without a blank line"
        )
    yield _decoded(file.read(), 0, rules), 1.0


def read_paragraphs(file: BinaryIO, rules: Format) -> Iterator[Record]:
    """Runs of lines that are not blank, without the line ends around them.

    Raises:
        BrokenFileError: for a run that is too large to be held in memory.
    """
    if not rules.keeps_line_ends:
        raise BrokenFileError(f"data.encoding={rules.encoding} needs data.txt_split=file, or convert the file to utf-8")
    run: list[bytes] = []
    start, position, size = 0, 0, 0  # bytes: of the run, of the line, in the run
    try:
        for line in read_lines(file, ".txt"):
            if line.strip() and line != codecs.BOM_UTF8:
                start = start if run else position
                run.append(line)
                size += len(line) + 1
            elif run:
                yield _decoded(b"\n".join(run).removesuffix(b"\r"), start, rules), share_read(file)
                run, size = [], 0
            if size > LONGEST:
                raise BrokenFileError(f"there is no blank line for {LONGEST >> 20} MiB")
            position += len(line) + 1
    except BrokenFileError as error:
        raise BrokenFileError(str(error), f"byte {start if run else position}") from None
    if run:
        yield _decoded(b"\n".join(run).removesuffix(b"\r"), start, rules), 1.0


def _decoded(content: bytes, start: int, rules: Format) -> str | BadRecord:
    text = content.removeprefix(codecs.BOM_UTF8) if start == 0 else content
    try:
        return text.decode(rules.encoding)
    except UnicodeDecodeError as error:
        return not_encoded(f"byte {start + error.start + len(content) - len(text)}", "", rules.encoding)
