"""What a bad disk does to a file; each says what it did, for whoever looks into a failure."""

from pathlib import Path
from random import Random


def truncate(file: Path, draws: Random) -> str:
    """Cut off at least one byte, at most all."""
    size = file.stat().st_size
    kept = draws.randrange(size) if size else 0
    with file.open("r+b") as opened:
        opened.truncate(kept)
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} cut from {size} to {kept} bytes"


def flip(file: Path, draws: Random) -> str:
    """Turn over one bit."""
    size = file.stat().st_size
    if size == 0:
        raise FileNotFoundError(f"{file} is empty")
    at, bit = draws.randrange(size), draws.randrange(8)
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} bit {bit} of byte {at} of {size} flipped"


def tear(file: Path, draws: Random) -> str:
    """Add a row that was broken off."""
    row = '{"step": 3, "tokens": 384, "train/loss": 4.159'
    kept = draws.randrange(1, len(row))
    with file.open("a", encoding="utf-8") as opened:
        opened.write(row[:kept])
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name} got a torn row of {kept} bytes"
