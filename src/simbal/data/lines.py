"""The lines of a plain, gzip or zstd file, read to the very end or not at all."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import zstandard

CHUNK = 1 << 18  # bytes read at once
LONGEST = 1 << 28  # bytes of one line
LARGEST_WINDOW = 1 << 31  # bytes, as `zstd --ultra --long=31` writes


class BrokenFileError(Exception):
    """The file cannot be read further, and why."""


def read_lines(file: BinaryIO, extension: str) -> Iterator[bytes]:
    """Lines without their `\\n`, the only separator: `str.splitlines` would also break at U+2028 and U+0085.

    Args:
        extension: .gz, .zst or anything else for a plain file.

    Raises:
        BrokenFileError: after the last whole line of a truncated or damaged file.
    """
    pending: list[bytes] = []  # of a line that is longer than a chunk
    for chunk in READERS.get(extension, _plain)(file):
        head, *rest = chunk.split(b"\n")
        pending.append(head)
        for start in rest:
            yield b"".join(pending)
            pending = [start]
        if sum(map(len, pending)) > LONGEST:
            raise BrokenFileError(f"the line is longer than {LONGEST >> 20} MiB")
    if pending != [b""]:
        yield b"".join(pending)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _gzip(file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.open(file) as members:
            while chunk := members.read(CHUNK):
                yield chunk
    except EOFError:
        raise BrokenFileError("the gzip file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BrokenFileError(f"this is not gzip ({error})") from None


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: `stream_reader` takes a truncated file for a complete one and says nothing."""
    frame = None
    try:
        while chunk := file.read(CHUNK):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise BrokenFileError(f"this is not zstd ({error})") from None
    if frame:
        raise BrokenFileError("the zstd file is cut short")


READERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {".gz": _gzip, ".zst": _zstd}
