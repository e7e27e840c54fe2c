"""Reads the curves of a run, finished or not, from its metrics.jsonl."""

from pathlib import Path
from typing import Any

from simbal import strict_json
from simbal.errors import UserError
from simbal.record_schema import LARGEST, is_number


def curve(run_path: Path, key: str) -> list[tuple[int, float]]:
    """The rows that have `key`, as (training tokens, value), by tokens; empty if there is none.

    Raises:
        UserError: as `rows` does, and if a value is no finite number.
    """
    points = [(row["tokens"], row[key]) for row in rows(run_path) if key in row]
    if not all(is_number(value) for _, value in points):
        raise UserError(f"{run_path / 'metrics.jsonl'} is broken: {key} is not a number everywhere")
    return sorted(points)


def rows(run_path: Path) -> list[dict[str, Any]]:
    """Every row in the order of writing, each with its `step` and `tokens`; none if the file is not there.

    What a killed process left of its last line, which no newline ends, is passed over.

    Raises:
        UserError: any other line is not a row; it names the file and the line.
    """
    file = run_path / "metrics.jsonl"
    if not file.exists():
        return []
    *whole, last = file.read_bytes().split(b"\n")
    try:
        found = strict_json.parse(b"[" + b",".join(whole) + b"]", False)  # all at once: half the time of one by one
        if len(found) == len(whole) and all(map(_is_row, found)):
            return [*found, *_parsed(last)]
    except ValueError:
        pass
    for number, line in enumerate(whole, 1):
        if not _parsed(line):
            raise UserError(f"{file} is broken: line {number} is no row of a curve; delete that line")
    raise UserError(f"{file} is broken: its lines are no rows of a curve")


def _parsed(line: bytes) -> list[dict[str, Any]]:
    """The row on a line; none if there is no whole one."""
    try:
        row = strict_json.parse(line, False)
    except ValueError:
        return []
    return [row] if _is_row(row) else []


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or type(row.get("step")) is not int or type(row.get("tokens")) is not int:
        return False
    return bool(0 <= row["step"] <= LARGEST and 0 <= row["tokens"] <= LARGEST)
