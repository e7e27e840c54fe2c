"""Convert plain text from the code to Markdown that shows it unchanged."""

import re
from collections.abc import Iterable, Sequence

WIDE = "---\nhide: [toc]\n---\n"  # front matter: hides the table of contents, which leaves more width
_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"[*{\[\]]|(?<!\w)_|_(?!\w)")  # a brace starts attributes; an underscore inside a word is safe
_PAPER = re.compile(r"\barXiv:? ?(\d{4}\.\d{5})")


def prose(text: str) -> str:
    """Escape the text of a comment or docstring except `code`, and link arXiv papers."""
    pieces = _CODE.split(text)
    pieces[::2] = [_escaped(piece) for piece in pieces[::2]]
    return "".join(pieces)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; cells are Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def code(text: str, language: str = "text") -> str:
    """Return a code block, which may contain other code blocks."""
    return f"~~~~{language}\n{text.rstrip()}\n~~~~\n"


def slug(heading: str) -> str:
    """Return the anchor that Python-Markdown gives to a heading."""
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
    """Escape the text of an HTML element inside a table cell."""
    return re.sub(r"[&<>|*_\[\]`\\]", lambda sign: f"&#{ord(sign[0])};", text)
