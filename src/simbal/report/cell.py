"""A cell of a table: its text, with the number that it shows."""

from dataclasses import dataclass

ABSENT = "—"


@dataclass(frozen=True)
class Cell:
    """A cell as plain text; whoever draws it decides where the aside stands."""

    text: str
    value: float | None = None  # the number that the text shows, by which a column is sorted
    aside: str = ""  # less important, beside the text or below it
    href: str = ""  # a link, relative to the folder of the table

    @property
    def line(self) -> str:
        """The whole cell on one line."""
        return f"{self.text} {self.aside}" if self.aside else self.text

    @property
    def lines(self) -> str:
        """The cell on two lines: its aside, or the end of an interval, below."""
        return f"{self.text}\n{self.aside}" if self.aside else self.text.replace(" to ", " to\n")


def number_cell(number: str, value: float | None) -> Cell:
    """Return a number in the format `number`; a dash for None."""
    return Cell(ABSENT if value is None else number.format(value), value)


def interval_cell(number: str, low: float | None, high: float | None) -> Cell:
    """Return `low to high`, sorted by `low`; a dash where there is no interval."""
    if low is None or high is None:
        return Cell(ABSENT)
    return Cell(f"{number.format(low)} to {number.format(high)}", low)
