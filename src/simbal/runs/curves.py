"""Reads the numbers that a run has measured: metrics.jsonl, its curves, and documents.json, its last validation.

metrics.jsonl is one JSON object per line, with its `step` and `tokens`; documents.json has the nats and tokens of each
document of the validation split.

No torch here: the sweep's parent process and `report.py` read these files without it.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from simbal.errors import UserError
from simbal.runs.folder import CURVES_FILE, DOCUMENTS_FILE
from simbal.runs.record import is_number


def rows(run_path: Path, key: str = "") -> list[dict[str, Any]]:
    """Return every row of a run's metrics.jsonl in the order of writing; none if the file is missing.

    What a killed process left of its last line, which no newline ends, is ignored.

    Args:
        run_path: the run's folder.
        key: a number; lines in which its name does not occur are then not looked at, and neither are the values by
            layer at the end of the others: both are most of a file.

    Raises:
        UserError: any other line is not a row; it names the file and the line.
    """
    file = run_path / CURVES_FILE
    try:
        *whole, last = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    for lines in ([*_heads(whole, key.encode())], whole) if key else (whole,):
        with suppress(ValueError):
            found = orjson.loads(b"[" + b",".join(lines) + b"]")  # all at once: half the time of one by one
            if len(found) == len(lines) and all(map(_is_row, found)):
                return [*found, *_parsed(last)]
    for number, line in enumerate(whole, 1):
        if not _parsed(line):
            raise UserError(f"{file} is broken: line {number} is no row of a curve; delete that line")
    raise UserError(f"{file} is broken: its lines are no rows of a curve")


def curve(run_path: Path, key: str, vouched: bool = False) -> list[tuple[int, float]]:
    """Return the rows that have `key`, as (training tokens, value), by tokens; empty if there is none.

    Args:
        run_path: the run's folder.
        key: the number.
        vouched: the run's record has the sha256 of the file, so that no line of it need be looked at for damage alone.

    Raises:
        UserError: as `rows` does, and if a value is no finite number.
    """
    points = [(row["tokens"], row[key]) for row in rows(run_path, key if vouched else "") if key in row]
    if not all(is_number(value) for _, value in points):
        raise UserError(f"{run_path / CURVES_FILE} is broken: {key} is not a number everywhere")
    return sorted(points)


def readable_rows(run_path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl that a run may be writing; other lines, and a missing file, have none.

    Raises:
        UserError: the file is none that a run writes: a pipe, a device, or larger than any.
    """
    try:
        *whole, _ = (run_path / CURVES_FILE).read_bytes().split(b"\n")
    except OSError:
        return []
    return [row for line in whole for row in _parsed(line)]


def _heads(lines: Sequence[bytes], key: bytes) -> Iterator[bytes]:
    """Yield the lines with `key`, without their values by layer if these come after it."""
    for line in lines:
        if key in line:
            head, found, layers = line.partition(b', "layers": ')
            yield head + b"}" if found and key not in layers else line


def _parsed(line: bytes) -> list[dict[str, Any]]:
    """Return the row on a line, as a list; none if there is no whole one."""
    try:
        row = orjson.loads(line)
    except ValueError:
        return []
    return [row] if _is_row(row) else []


def _is_row(row: Any) -> bool:
    counts = [row.get("step"), row.get("tokens")] if isinstance(row, dict) else [None]
    return all(type(count) is int and count >= 0 for count in counts)


@dataclass(frozen=True)
class DocumentSums:
    """The sums of each document, in the order of the split; a document that was not seen has 0 tokens."""

    nats: Sequence[float]  # cross-entropy over its tokens
    tokens: Sequence[int]


def document_sums(run_path: Path) -> DocumentSums | None:
    """Return the sums of a run's documents; None if it has no documents.json.

    Raises:
        UserError: the file is broken; it is named.
    """
    file = run_path / DOCUMENTS_FILE
    try:
        said = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is broken: {error}") from None
    nats, tokens = _lists(said)
    if not (_are_numbers(nats) and _are_numbers(tokens) and all(isinstance(count, int) for count in tokens)):
        raise UserError(f"{file} is broken: it must have nats and tokens of each document, none below 0")
    if len(nats) != len(tokens):
        raise UserError(f"{file} is broken: it has nats of {len(nats):,} documents and tokens of {len(tokens):,}")
    return DocumentSums(array("d", nats), array("q", tokens))  # a quarter of the memory of lists


def _lists(said: Any) -> tuple[Any, Any]:
    """Return what stands under `nats` and `tokens`, of any kind."""
    return (said.get("nats"), said.get("tokens")) if isinstance(said, dict) else (None, None)


def _are_numbers(values: Any) -> bool:
    if not isinstance(values, list) or not {*map(type, values)} <= {int, float}:
        return False
    return not values or min(values) >= 0
