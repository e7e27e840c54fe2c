"""The result of an analysis: tables and sentences for people, and numbers for programs, as JSON on the disk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simbal.errors import UserError
from simbal.files.console import new_grid
from simbal.files.disk import refusals_of_disk, write_json
from simbal.runs.record import is_number, sealed, unsealed


@dataclass(frozen=True)
class Finding:
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
        content = sealed(content)
    except ValueError:
        raise UserError(f"{file} is not written: the analysis has found a number that is infinite or none") from None
    with refusals_of_disk(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)


def read_analysis(file: Path) -> dict[str, Any] | None:
    """Return what `write_analysis` has written, or None if there is no such file.

    Raises:
        UserError: there is anything else.
    """
    try:
        content = unsealed(file.read_bytes())
        if not _is_whole(content):
            raise ValueError("it is no analysis")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is broken ({error}): delete it and do the analysis again") from None
    return content


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
    """Whether an analysis was done with these settings, as far as they are written."""
    return sealed(content["settings"]) == sealed(settings)


def _is_whole(content: dict[str, Any]) -> bool:
    definition, numbers = content.get("definition"), content.get("metrics", {})
    if not all(isinstance(part, dict) for part in (content.get("settings"), definition, numbers)):
        return False
    assert definition is not None
    texts = all(isinstance(text, str) for text in definition.values())
    return texts and all(value is None or is_number(value) for value in numbers.values())
