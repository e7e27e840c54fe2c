"""The result of an analysis: tables to print, and numbers to store in a JSON file.

No torch here: `report.py` reads these files without it.
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

MODEL = "model.json"  # describes the Hugging Face model and the text that the analyses in the same folder measured
# keys of model.json that affect the numbers
DECIDES = ("digests", "tokenizer", "context", "dtype", "data", "document_tokens", "seed")
PACKAGES = ("simbal", "torch", "transformers")


@dataclass(frozen=True)
class Result:
    """The tables, notes and numbers of one analysis."""

    tables: list[Table]
    notes: list[str]
    record: dict[str, Any]  # serializable as JSON: `definition`, `metrics`, and `layers` if measured by layer

    def show(self, out: Console) -> None:
        """Print the tables and then the notes."""
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
    """Return a table whose first `texts` columns contain text and whose other columns contain numbers.

    A line separates the rows of `last` from the others.
    """
    grid = new_grid(title)
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if index < texts else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    grid.add_section()
    for row in last:
        grid.add_row(*row)
    return grid


def layer_table(
    title: str,
    columns: Mapping[str, tuple[str, str]],
    layers: Mapping[str, Sequence[float | None]],
    last: Mapping[str, Mapping[str, float | None]],
) -> Table:
    """Return a table with one row per layer and one row for each entry of `last`.

    Args:
        title: title of the table.
        columns: heading and format of each number.
        layers: the values of each number by layer. Columns without values are omitted.
        last: label and numbers of each row below the line. Cells without a number stay empty.
    """
    columns = {name: column for name, column in columns.items() if name in layers}

    def cell(name: str, value: float | None) -> str:
        return "-" if value is None else format(value, columns[name][1])

    headings = [heading for heading, _ in columns.values()]
    first = "\nlayer" if any("\n" in heading for heading in headings) else "layer"
    num_layers = max(len(values) for values in layers.values())
    rows = [[str(layer), *(cell(name, layers[name][layer]) for name in columns)] for layer in range(num_layers)]
    below = [
        [label, *(cell(name, numbers[name]) if name in numbers else "" for name in columns)]
        for label, numbers in last.items()
    ]
    return numbers_table(title, [first, *headings], rows, below)


def write_analysis(file: Path, content: Mapping[str, Any]) -> None:
    """Write the file of an analysis atomically.

    Raises:
        UserError: the file cannot be written, or a number is infinite or NaN.
    """
    try:
        content = with_checksum(content)
    except ValueError:
        raise UserError(f"cannot write {file}: the analysis produced an infinite number or NaN") from None
    _write(file, content)


def read_analysis(file: Path) -> dict[str, Any] | None:
    """Return the content of an analysis file, or None if it does not exist; `UserError` if it is damaged."""
    return _read(file, "delete it and run the analysis again") if file.exists() else None


def numbers_of(analysis: Mapping[str, Any]) -> Iterator[tuple[str, int | None, float]]:
    """Yield (name, layer, value) of each number: first the model's, with layer None, then each layer's.

    Lists of lists, such as the tokens per expert, are skipped.
    """
    for name, value in analysis["metrics"].items():
        if value is not None:
            yield name, None, value
    for name, values in analysis.get("layers", {}).items():
        for layer, value in enumerate(values):
            if isinstance(value, int | float):
                yield name, layer, value


def has_settings(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether an analysis file was written with these settings."""
    return with_checksum(content["settings"]) == with_checksum(settings)


def is_measured_model(folder: Path) -> bool:
    """Return whether a folder contains analyses of a Hugging Face model."""
    return (folder / MODEL).is_file()


def read_model(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's model.json; `UserError` if it is damaged."""
    return _read(folder / MODEL, f"delete {folder} and measure the model again")


def write_model(folder: Path, content: dict[str, Any]) -> None:
    """Write a folder's model.json unless it exists."""
    if not is_measured_model(folder):
        versions = {"versions": {name: importlib.metadata.version(name) for name in PACKAGES}}
        _write(folder / MODEL, with_checksum(content | versions))


def require_same_model(folder: Path, decides: Mapping[str, Any]) -> None:
    """Raise `UserError` if the folder contains analyses of a different model or text."""
    if not is_measured_model(folder):
        return
    existing = read_model(folder)
    for key, value in with_checksum(decides).items():
        if key in DECIDES and existing[key] != value:
            old, new = (v.get("tokens", v.get("weights")) if isinstance(v, dict) else v for v in (existing[key], value))
            raise UserError(
                f"{folder} contains results with a different {key} ({str(old)[:16]}, not {str(new)[:16]}): choose a "
                "different name=, or delete the folder"
            )


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with explain_write_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)


def _read(file: Path, remedy: str) -> dict[str, Any]:
    try:
        return verify_checksum(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): {remedy}") from None
