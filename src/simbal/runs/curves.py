"""Reads a run's measurements: curves in metrics.jsonl, and the last validation by document in documents.json.

metrics.jsonl has one JSON object per line, each with `step` and `tokens`. documents.json has the summed loss and the
number of tokens of each document of the validation split.

No torch here: the sweep's parent process and `report.py` read these files without it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from simbal.errors import UserError
from simbal.runs.folder import CURVES_FILE, DOCUMENTS_FILE
from simbal.runs.record import is_number


def rows(run_path: Path, key: str = "", skip_damaged: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl in the order of writing; [] if the file is missing.

    A last line without a newline is ignored: a killed process leaves one.

    Args:
        run_path: the run folder.
        key: parse only lines that contain this text, such as the name of a metric.
        skip_damaged: skip damaged lines, which can occur while a run writes the file.

    Raises:
        UserError: a line is damaged; the error names it.
    """
    file, parsed = run_path / CURVES_FILE, list[dict[str, Any]]()
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if key.encode() not in line:
            continue
        row = _parse_row(line)
        if row is not None:
            parsed.append(row)
        elif number < len(lines) and not skip_damaged:
            raise UserError(f"{file} is damaged: line {number} is not a row of a curve; delete that line")
    return parsed


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and all(isinstance(row.get(key), int) for key in ("step", "tokens")) else None


def curve(run_path: Path, key: str) -> list[tuple[int, float]]:
    """Return (training tokens, value) of the rows that have `key`, sorted by tokens.

    Raises:
        UserError: a line is damaged, or a value is not a finite number.
    """
    points = [(row["tokens"], row[key]) for row in rows(run_path, key) if key in row]
    if not all(is_number(value) for _, value in points):
        raise UserError(f"{run_path / CURVES_FILE} is damaged: {key} must be a number in every row")
    return sorted(points)


@dataclass(frozen=True)
class DocumentSums:
    """Sums by document, in the order of the validation split; 0 tokens if a document was not evaluated."""

    nats: Sequence[float]  # cross-entropy summed over the document's tokens
    tokens: Sequence[int]


def document_sums(run_path: Path) -> DocumentSums | None:
    """Return the sums of a run's documents; None without documents.json, and `UserError` if it is damaged."""
    file = run_path / DOCUMENTS_FILE
    try:
        content = orjson.loads(file.read_bytes())
        sums = DocumentSums(array("d", content["nats"]), array("q", content["tokens"]))  # a quarter of a list's memory
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{file} is damaged: it must contain the nats and tokens of each document") from None
    if len(sums.nats) != len(sums.tokens):
        raise UserError(f"{file} is damaged: nats and tokens must have the same length")
    return sums
