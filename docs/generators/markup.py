"""Plain text of the code, as Markdown that shows it letter by letter."""

import re
from collections.abc import Iterable, Sequence

WIDE = "---\nhide: [toc]\n---\n"  # at a page's top: no column of contents, and its width for long lines
_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"[*{\[\]]|(?<!\w)_|_(?!\w)")  # a brace starts attributes; f_i is safe
_PAPER = re.compile(r"\barXiv:? ?(\d{4}\.\d{5})")


def prose(text: str) -> str:
    """Return the text of a comment or a docstring: nothing is markup but `code`, and papers become links."""
    pieces = _CODE.split(text)
    pieces[::2] = [_escaped(piece) for piece in pieces[::2]]
    return "".join(pieces)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the cells are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def code(text: str, language: str = "text") -> str:
    """Return a block of code, which may hold blocks of code."""
    return f"~~~~{language}\n{text.rstrip()}\n~~~~\n"


def slug(heading: str) -> str:
    """Return the anchor of a heading, as Python-Markdown makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _escaped(text: str) -> str:
    safe = _SPECIAL.sub(r"\\\g<0>", text).replace("<", "&lt;")
    return _PAPER.sub(r"[\g<0>](https://arxiv.org/abs/\1)", safe)


def _cell(text: str) -> str:
    pieces = _CODE.split(" ".join(text.split()))
    pieces[::2] = [re.sub(r"(?<!\\)\|", r"\|", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"<code>{_entities(piece.strip('`'))}</code>" for piece in pieces[1::2]]
    return "".join(pieces)


def _entities(text: str) -> str:
    """Return text for inside an element: no bar ends the cell, and nothing is markup."""
    return re.sub(r"[&<>|*_\[\]`\\]", lambda sign: f"&#{ord(sign[0])};", text)
