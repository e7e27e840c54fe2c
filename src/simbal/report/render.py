"""Show a table: on the terminal, and as table.md, table.tex, table.csv and table.json in the folder of its runs."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from simbal.console import new_grid
from simbal.metrics.definitions import Metric
from simbal.report import sections
from simbal.report.columns import ABSENT, Cell
from simbal.report.comparison import Row
from simbal.report.notes import notes, remarks
from simbal.report.sections import Section, status_and_error
from simbal.report.statistics import Difference
from simbal.report.table import Table
from simbal.runs.atomic import write_json, write_text

MOST_NOTE_LINES = 4
MOST_ROWS = 100  # rows of arms, and of runs without a result, on the terminal
# columns to leave out on a narrow terminal, in this order
SPARE = ("Welch p", "d_z", "p (paired)", "p", "detectable", "tokens needed", "seeds", "over documents", "pairs")
GAP = 2  # spaces for each column
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
MARKUP = re.compile(r"[\\|*]|<(?=[A-Za-z/!?])")
SIGNS = {
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "±": r"$\pm$", "↓": r"$\downarrow$",
    "↑": r"$\uparrow$", "—": "---", "\N{MINUS SIGN}": "$-$",
}  # fmt: skip
NEGATIVE = re.compile(r"(?<![\w.-])-(?=\.?\d)")
LATEX = re.compile(f"[{re.escape(''.join(SIGNS))}]|[^\x00-\x7f\u00c0-\u00ff]")  # what LaTeX would alter
CSV_NUMBERS = (
    "metric", "mean", "sd", "n", "seeds", "baseline", "scale", "difference", "low", "high", "pairs", "p",
    "p_paired", "d_z", "detectable", "pooled", "conclusion", "documents_error", "documents_low", "documents_high",
    "documents", "welch_difference", "welch_df", "welch_p",
)  # fmt: skip
CSV_PAPER = ("paper_m", "paper_l", "paper_m_sd")


def show(table: Table, out: Console, explain: bool = False, in_files: bool = True) -> None:
    """Print the most important notes, runs without a result and a summary; with `explain`, everything.

    Args:
        table: the table to print.
        out: the console.
        explain: print all notes, columns, differences and tokens saved.
        in_files: whether table.md and the other files were written.
    """
    every_note = shown_notes = notes(table)
    if not explain:
        important = remarks(table)
        lines = accumulate(ceil(cell_len(note) / out.width) for note in important)
        shown_notes = [note for note, count in zip(important, lines, strict=True) if count <= MOST_NOTE_LINES]
    for note in shown_notes:
        out.print(note, style="dim")
    out.print()
    shown = table.best_arms(MOST_ROWS)
    absent = sections.absent(shown)
    details = [sections.differences(shown)] if explain or table.pairs or table.chosen else []
    details += [sections.tokens_to_loss(shown)] if explain else []
    left_out = []
    for section in details:
        if section.rows:
            spare = [section.headings.index(heading) for heading in SPARE if heading in section.headings]
            left_out += print_section(section, out, spare)
    if absent.rows:
        print_section(replace(absent, rows=absent.rows[:MOST_ROWS]), out)
        if more := len(absent.rows[MOST_ROWS:]):
            out.print(f"and {more:,} more runs without a result")
    means = sections.means(shown, short=True) if explain else sections.summary(shown)
    if means.rows:
        spare = [
            place for place in range(len(means.headings) - 1, means.texts, -1) if means.headings[place] != "conclusion"
        ]
        left_out += print_section(means, out, spare)
    hints = []
    if explain and any(cell.muted for row in means.rows for cell in row):
        hints.append(f"Faint: the difference from {table.baseline} is not resolved.")
    if len(shown.rows) < len(table.rows):
        hints.append(f"Shown: the {len(shown.rows)} of {len(table.rows):,} arms with the lowest validation loss.")
    if left_out:
        where = "the files have all columns" if in_files else "a wider terminal shows all columns"
        hints.append(f"Left out at this width: {', '.join(left_out)}; {where}.")
    if not explain:
        more = len(every_note) - len(shown_notes)
        where = "explain=true or table.md" if in_files else "explain=true"
        hints.append(f"More columns, p-values, tokens saved and {more} notes: {where}.")
    for hint in hints:
        out.print(hint, style="dim")


def print_section(section: Section, out: Console, spare: Sequence[int] = ()) -> list[str]:
    """Print a section without the first of its `spare` columns, so that it fits; return the headings of these columns.

    Cells and headings are wrapped where words and numbers allow it.
    """
    section = replace(section, headings=[re.sub(" (?=[↓↑])", NO_BREAK_SPACE, each) for each in section.headings])
    for count in range(len(spare) + 1):
        shown = section.without(spare[:count])
        widths, fits = _column_widths(shown, out.width)
        if fits:
            break
    out.print(section.title, style="bold")  # a title in the grid would be wrapped at the width of the grid
    grid = new_grid("")
    for place, (heading, width) in enumerate(zip(shown.headings, widths, strict=True)):
        lines = "\n".join(wrap(heading, width))
        grid.add_column(lines, justify="left" if place < section.texts else "right", overflow="fold", width=width)
    for row in shown.rows:
        grid.add_row(
            *(
                Text(cell.line if cell_len(cell.line) <= width else cell.lines, "dim" if cell.muted else "")
                for cell, width in zip(row, widths, strict=True)
            )
        )
    out.print(grid)
    return [*dict.fromkeys(section.headings[place].rstrip(f"{NO_BREAK_SPACE}↓↑") for place in sorted(spare[:count]))]


def _column_widths(section: Section, total: int) -> tuple[list[int], bool]:
    """Return the widths of the columns, and whether they fit without breaking words and numbers."""
    widths, least = [], []
    for place, heading in enumerate(section.headings):
        cells = [row[place] for row in section.rows]
        is_text = place < section.texts and heading != "metric"
        parts = [part for cell in cells for part in (cell.text.split() if is_text else cell.lines.split("\n"))]
        widths.append(max(map(cell_len, [heading, *(cell.line for cell in cells)])))
        least.append(max(map(cell_len, [*heading.split(" "), *parts])))
    while sum(widths) > max(len(widths), total - GAP * len(widths)):
        slack = [width - smallest for width, smallest in zip(widths, least, strict=True)]
        reducible = slack if max(slack) > 0 else widths
        widths[reducible.index(max(reducible))] -= 1
    return widths, all(width >= smallest for width, smallest in zip(widths, least, strict=True))


def write_tables(table: Table, folder: Path) -> None:
    """Write table.md and table.tex, which are rounded, and table.csv and table.json in full precision."""
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.tex", latex(table))
    write_text(folder / "table.csv", tidy_csv(table))
    write_json(folder / "table.json", as_json(table))


def markdown(table: Table) -> str:
    """Return the table in GitHub Markdown."""
    parts = [f"# {escape(table.name)}"]
    for section in sections.sections(table):
        parts += [f"{escape(section.title)}:", markdown_table(section.headings, section.lines)]
    parts.append("\n".join(f"- {escape(note)}" for note in notes(table)))
    return "\n\n".join(parts).rstrip() + "\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with plain text in its cells."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(escape, line))} |" for line in lines)


def escape(text: str) -> str:
    """Return plain text on one line with Markdown's special characters escaped."""
    return MARKUP.sub(r"\\\g<0>", text).replace("\n", " ")


def latex(table: Table) -> str:
    """Return the sections as booktabs tabulars with their titles, followed by the notes."""
    head = f"% {table.name}: written by report.py; needs \\usepackage[T1]{{fontenc}} and \\usepackage{{booktabs}}"
    items = "\n".join(rf"  \item {escape_latex(note)}" for note in notes(table))
    tail = [f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}"] if items else []
    return "\n\n".join([head, *map(_tabular, sections.sections(table)), *tail]) + "\n"


def _tabular(section: Section) -> str:
    columns = "l" * section.texts + "r" * (len(section.headings) - section.texts)
    head = [rf"\noindent {escape_latex(section.title)}", "", rf"\noindent\begin{{tabular}}{{{columns}}}", r"\toprule"]
    headings, *body = [" & ".join(map(escape_latex, row)) + r" \\" for row in (section.headings, *section.lines)]
    return "\n".join([*head, headings, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints unchanged; a character unknown to pdflatex becomes a code point, `U+4E2D`."""
    text = NEGATIVE.sub("\N{MINUS SIGN}", " ".join(text.split()))
    return LATEX.sub(lambda match: SIGNS.get(match[0], f"U+{ord(match[0]):04X}"), text)


def tidy_csv(table: Table) -> str:
    """Return `tidy_rows` as CSV."""
    text = io.StringIO()
    paper = CSV_PAPER if any(row.reported for row in table.rows) else ()
    writer = csv.DictWriter(text, [*table.columns, *CSV_NUMBERS, *paper, "missed"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(tidy_rows(table))
    return text.getvalue()


def tidy_rows(table: Table) -> Iterator[dict[str, Any]]:
    """Yield one row per arm and metric in full precision; keys without a value are left out.

    `tokens_saved` follows the metrics: its mean is the fraction of the baseline's tokens saved, and `missed` lists
    the seeds that never reached the baseline's loss. The mean of `tokens_saved_by_slope` is in ln tokens. If `scale` is
    ln, differences are of natural logarithms.
    """
    for row in table.rows:
        label = _label_texts(row.arm.label)
        for metric in table.metrics:
            line: dict[str, Any] = {"metric": metric.key, "n": 0, "seeds": _join(row.arm.values(metric.key))}
            if summary := row.summaries[metric.key]:
                line |= vars(summary)
            if difference := row.differences.get(metric.key):
                line |= _difference_line(difference, table.baseline)
            if metric.key in row.reported:
                line |= zip(CSV_PAPER, row.reported[metric.key], strict=True)
            yield label | line
        if tokens := row.tokens_to_loss:
            label |= {"baseline": table.baseline, "n": len(tokens.shares), "seeds": _join(tokens.shares)}
            saved = {"mean": tokens.saving, "low": tokens.low, "high": tokens.high, "missed": _join(tokens.missed)}
            yield label | {"metric": "tokens_saved"} | saved
            if slope := tokens.by_slope:
                saved = {"mean": slope.mean, "low": slope.low, "high": slope.high, "scale": "ln"}
                yield label | {"metric": "tokens_saved_by_slope"} | saved
    for model in table.models:
        for metric in table.metrics:
            if (value := model.value(metric.key)) is not None:
                yield {table.columns[0]: model.name, "metric": metric.key, "mean": value, "n": 1}
    for row in table.pairs:
        for key, difference in row.differences.items():
            assert row.other
            yield _label_texts(row.arm.label) | {"metric": key} | _difference_line(difference, row.other.name)


def _join(seeds: Iterable[int]) -> str:
    return " ".join(map(str, seeds))


def _difference_line(difference: Difference, baseline: str | None) -> dict[str, Any]:
    same = ("scale", "low", "high", "pairs", "p", "p_paired", "detectable", "pooled", "conclusion")
    line = {key: getattr(difference, key) for key in same}
    line |= {"baseline": baseline, "difference": difference.mean, "d_z": difference.effect}
    if over := difference.over_documents:
        line |= {"documents_error": over.error, "documents_low": over.low, "documents_high": over.high}
        line["documents"] = over.documents
    if welch := difference.welch:
        line |= {"welch_difference": welch.mean, "welch_df": welch.degrees_of_freedom, "welch_p": welch.p}
    return line


def as_json(table: Table) -> dict[str, Any]:
    """Return every number of the table with the folders, seeds and values from which it was computed."""
    return {
        "name": table.name,
        "baseline": table.baseline,
        "equivalence_margin": table.margin,
        "metrics": {metric.key: metric.title for metric in table.metrics},
        "arms": [_arm_json(row, table.metrics) for row in table.rows],
        "pairs": [
            {"arm": row.arm.name, "other": row.other and row.other.name, "differences": _differences_json(row)}
            for row in table.pairs
        ],
        "models": [{"folder": str(model.path), **model.facts, "values": model.analyzed} for model in table.models],
        "without_result": [
            {"run": label, "folder": str(run.path), "seed": run.seed, "status": status, "error": error}
            for label, run in table.absent
            for status, error in [status_and_error(run)]
        ],
        "missing": [{"run": label, "folder": folder} for folder, label in table.missing.items()],
        "notes": notes(table),
    }


def _arm_json(row: Row, metrics: Sequence[Metric]) -> dict[str, Any]:
    runs = [
        {
            "folder": str(run.path),
            "config_hash": run.spec.hash,
            "seed": run.seed,
            "values": {metric.key: run.value(metric.key) for metric in metrics},
        }
        for run in row.arm.runs
    ]
    return {
        "label": _label_texts(row.arm.label),
        "runs": runs,
        "summaries": {key: summary and vars(summary) for key, summary in row.summaries.items()},
        "differences": _differences_json(row),
        "tokens_to_loss": row.tokens_to_loss and asdict(row.tokens_to_loss),
        "paper": {key: numbers._asdict() for key, numbers in row.reported.items()},
    }


def _differences_json(row: Row) -> dict[str, Any]:
    return {key: difference.numbers() for key, difference in row.differences.items()}


def _label_texts(label: Mapping[str, Cell]) -> dict[str, Any]:
    return {column: None if cell.text == ABSENT else cell.text for column, cell in label.items()}
