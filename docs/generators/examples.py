"""The programs in docs/examples/, each a page that shows it whole."""

from pathlib import Path

from generators import source
from generators.markup import WIDE, code, prose

FOLDER = "examples"


def example_pages(docs: Path) -> dict[str, str]:
    """`examples/<name>.md` of every program there."""
    return {f"{FOLDER}/{file.stem}.md": _page(file) for file in sorted((docs / FOLDER).glob("*.py"))}


def _page(file: Path) -> str:
    title, place = file.stem.replace("_", " ").capitalize(), f"docs/{FOLDER}/{file.name}"
    program = code(file.read_text(encoding="utf-8"), "python")
    return f"{WIDE}# {title}\n\n{prose(source.docstring(file))}\n\n`{place}`:\n\n{program}"
