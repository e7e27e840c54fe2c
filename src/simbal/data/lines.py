"""The lines of a plain, gzip or zstd file, read to the very end or not at all."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import zstandard

CHUNK = 1 << 18  # bytes read at once
LONGEST = 1 << 28  # bytes of one line
LARGEST_WINDOW = 1 << 31  # bytes, as `zstd --ultra --long=31` writes


class BrokenFileError(Exception):
    """The file cannot be read further, why, and from which place on if that is known."""

    def __init__(self, reason: str, place: str | None = None) -> None:
        super().__init__(reason)
        self.place = place


def read_lines(file: BinaryIO, extension: str) -> Iterator[bytes]:
    """Lines without their `\\n`, the only separator: `str.splitlines` would also break at U+2028 and U+0085.

    Args:
        extension: .jsonl.gz, .jsonl.zst or anything else for a plain file.

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
    yield b"".join(pending)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _packed(file: BinaryIO, kind: str, decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """All members or frames, one after the other; file objects take a truncated zstd file for a complete one."""
    member = None
    try:
        while chunk := file.read(CHUNK):
            while chunk:
                member = member or decompressor()  # zlib's and zstandard's have one interface
                yield member.decompress(chunk)
                chunk = member.unused_data if member.eof else b""
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
