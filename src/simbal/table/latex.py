r"""A table as LaTeX, to be read by a paper with \input{table.tex}; it needs the package booktabs."""

import re
from collections.abc import Sequence

from simbal.table.sections import Section, sections
from simbal.table.table import Table

SIGNS = {
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "±": r"$\pm$", "↓": r"$\downarrow$",
    "↑": r"$\uparrow$", "—": "---", "…": r"\ldots{}", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$",
    "\N{MINUS SIGN}": "$-$", "\N{EN DASH}": "--", "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{LEFT SINGLE QUOTATION MARK}": "`", "\N{RIGHT SINGLE QUOTATION MARK}": "'",
}  # fmt: skip
NEGATIVE = re.compile(r"(?<![\w.-])-(?=\.?\d)")
LIGATURE = re.compile(r"-(?=-)")


def latex(table: Table) -> str:
    """Its parts as booktabs tabulars, each under its title, and the notes below."""
    head = (
        f"% {_line(table.name)}: written by report.py; needs \\usepackage[T1]{{fontenc}} and \\usepackage{{booktabs}}"
    )
    parts = [head, *map(_tabular, sections(table))]
    if table.notes:
        items = "\n".join(rf"  \item {escape(note)}" for note in table.notes)
        parts.append(f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    r"""Text that LaTeX prints as it stands; a sign that pdflatex does not know becomes its code point, `U+4E2D`."""
    plain = NEGATIVE.sub("\N{MINUS SIGN}", _line(text))
    return "".join("-{}" if LIGATURE.match(plain, place) else _sign(letter) for place, letter in enumerate(plain))


def _sign(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    return letter if letter.isascii() or "\u00c0" <= letter <= "\u00ff" else f"U+{ord(letter):04X}"


def _line(text: str) -> str:
    """Without line breaks and other control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _tabular(section: Section) -> str:
    columns = "l" * section.texts + "r" * (len(section.headings) - section.texts)
    lines = [
        rf"\noindent {escape(section.title)}",
        "",
        rf"\noindent\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _row(section.headings),
        r"\midrule",
        *map(_row, section.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    """A cell that begins with a bracket would be read as an option of the row before."""
    return " & ".join(f"{{}}{escape(cell)}" if cell.startswith(("[", "*")) else escape(cell) for cell in cells) + r" \\"
