"""What an analysis found: tables and sentences for people, numbers for programs."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """Everything an analysis has to say; it prints and writes nothing itself."""

    tables: list[Table]
    notes: list[str]
    record: dict[str, Any]  # what JSON can hold: numbers in full precision, their definition and source

    def show(self, out: Console) -> None:
        """Print the tables, and the notes below them."""
        for table in self.tables:
            out.print(table)
        for note in self.notes:
            out.print(note)
