"""The table of docs/guide/architectures.md, each column of which a test finds anew."""

from tests.conftest import CONF

GUIDE = CONF.parent / "docs/guide/architectures.md"


def table() -> dict[str, dict[str, str]]:
    """The rows of the guide's table by architecture, each by the heads of its columns."""
    lines = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    heads, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0].strip("`"): dict(zip(heads, row, strict=True)) for row in rows}
