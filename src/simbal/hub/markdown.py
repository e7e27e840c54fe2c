"""Text of others inside Markdown: shown as it is, and never markup, a link or HTML."""

import re

from simbal.printable import printable

RUNS = re.compile("`+")


def code(value: object) -> str:
    """A code span on one line, in which nothing is interpreted."""
    text = " ".join(printable(str(value)).split()) or " "
    ticks = _longer_than_any(text, 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def block(lines: list[str]) -> str:
    """A fenced block of code."""
    text = printable("\n".join(lines))
    fence = _longer_than_any(text, 3)
    return f"{fence}\n{text}\n{fence}"


def _longer_than_any(text: str, least: int) -> str:
    """More backticks than stand together anywhere in the text."""
    return "`" * max([least, *(len(run) + 1 for run in RUNS.findall(text))])
