"""The result of an analysis: tables for people, numbers for programs, and the files that hold them.

No torch here: `report.py` reads these files.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simbal.console import new_grid
from simbal.errors import UserError
from simbal.runs.atomic import explain_write_errors, write_json
from simbal.runs.record import verify_checksum, with_checksum

MODEL = "model.json"  # which Hugging Face model the analyses beside it have measured, on which text
# the keys of model.json that decide the numbers
DECIDES = ("digests", "tokenizer", "context", "dtype", "data", "document_tokens", "seed")
PACKAGES = ("simbal", "torch", "transformers")


@dataclass(frozen=True)
class Result:
    """The result of an analysis; it prints itself only by `show`, and writes nothing."""

    tables: list[Table]
    notes: list[str]
    record: dict[str, Any]  # what JSON can hold: numbers in full precision, their definition and source

    def show(self, out: Console) -> None:
        """Print the tables, and the notes below them."""
        for table in self.tables:
            out.print(table)
        for note in self.notes:
            out.print(note)


def numbers_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    last: Iterable[Sequence[str]] = (),
    texts: int = 1,
) -> Table:
    """Return a table whose first `texts` columns are text and whose others are numbers, with a line above `last`."""
    grid = new_grid(title)
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if place < texts else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    grid.add_section()
    for row in last:
        grid.add_row(*row)
    return grid


def write_analysis(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file of an analysis atomically.

    Raises:
        UserError: the disk refuses, or a number is infinite or NaN.
    """
    try:
        content = with_checksum(content)
    except ValueError:
        raise UserError(f"{file} is not written: the analysis has found a number that is infinite or NaN") from None
    _write(file, content)


def read_analysis(file: Path) -> dict[str, Any] | None:
    """Return what `write_analysis` has written, or None if there is no such file; `UserError` if it is damaged."""
    return _read(file, "delete it and run the analysis again") if file.exists() else None


def numbers_of(analysis: Mapping[str, Any]) -> Iterator[tuple[str, int | None, float]]:
    """Yield (number, layer, value): of the model, with layer None, then of each layer.

    Lists of lists, as the tokens of every expert, are left out.
    """
    for number, value in analysis["metrics"].items():
        if value is not None:
            yield number, None, value
    for number, of_layers in analysis.get("layers", {}).items():
        for layer, value in enumerate(of_layers):
            if isinstance(value, int | float):
                yield number, layer, value


def made_with(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether an analysis was made with these settings, as far as they are written."""
    return with_checksum(content["settings"]) == with_checksum(settings)


def is_measured_model(folder: Path) -> bool:
    """Whether a folder holds the analyses of a Hugging Face model."""
    return (folder / MODEL).is_file()


def read_model(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's model.json; `UserError` if it is damaged."""
    return _read(folder / MODEL, f"delete {folder} and measure the model again")


def write_model(folder: Path, content: dict[str, Any]) -> None:
    """Write a folder's model.json, unless it is there."""
    if not is_measured_model(folder):
        versions = {"versions": {name: importlib.metadata.version(name) for name in PACKAGES}}
        _write(folder / MODEL, with_checksum(content | versions))


def require_same_model(folder: Path, decides: Mapping[str, Any]) -> None:
    """Raise `UserError` if the analyses in a folder are of another model, or of another text."""
    if not is_measured_model(folder):
        return
    there = read_model(folder)
    for key, value in with_checksum(decides).items():
        if key in DECIDES and there[key] != value:
            old, new = (v.get("tokens", v.get("weights")) if isinstance(v, dict) else v for v in (there[key], value))
            raise UserError(
                f"{folder} holds what was measured with another {key} ({str(old)[:16]}, not {str(new)[:16]}): choose "
                "another name=, or delete the folder"
            )


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with explain_write_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)


def _read(file: Path, remedy: str) -> dict[str, Any]:
    try:
        return verify_checksum(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is broken ({error}): {remedy}") from None
