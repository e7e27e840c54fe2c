"""Writes a table to table.md, table.tex, table.csv and table.json beside the runs that it was made from."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simbal.metrics.definitions import Metric
from simbal.report.columns import ABSENT, Cell
from simbal.report.comparison import Row
from simbal.report.notes import notes
from simbal.report.sections import Section, absence, sections
from simbal.report.statistics import PairedDifference
from simbal.report.table import Table
from simbal.report.tokens_to_loss import SlopeSaving, TokensToLoss
from simbal.runs.atomic import write_json, write_text

MARKUP = re.compile(r"[\\|*]|<(?=[A-Za-z/!?])")
MEAN = ("mean", "sd", "n", "seeds")
PAIRED = ("baseline", "scale", "difference", "low", "high", "pairs", "p", "p_holm", "d_z")
DOCUMENTS = ("documents_error", "documents_low", "documents_high", "documents")
CONCLUDED = ("detectable", "p_equivalent", "conclusion")
WELCH = ("welch_difference", "welch_df", "welch_p")
PAPER = ("paper_m", "paper_l", "paper_m_sd")
SIGNS = {
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "±": r"$\pm$", "↓": r"$\downarrow$",
    "↑": r"$\uparrow$", "—": "---", "…": r"\ldots{}", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$",
    "\N{MINUS SIGN}": "$-$", "\N{EN DASH}": "--", "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{LEFT SINGLE QUOTATION MARK}": "`", "\N{RIGHT SINGLE QUOTATION MARK}": "'",
}  # fmt: skip
NEGATIVE = re.compile(r"(?<![\w.-])-(?=\.?\d)")
# what LaTeX does not print as it stands
LATEX = re.compile(f"-(?=-)|[{re.escape(''.join(SIGNS))}]|[^\x00-\x7f\u00c0-\u00ff]")


def export(table: Table, folder: Path) -> None:
    """Write the four files, each atomically: two rounded for people, csv and json in full precision."""
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.tex", latex(table))
    write_text(folder / "table.csv", tidy_csv(table))
    write_json(folder / "table.json", as_json(table))


def markdown(table: Table) -> str:
    """Return the table in GitHub markdown, with the same sections as on the terminal."""
    parts = [f"# {escape(table.name)}"]
    for section in sections(table):
        parts += [f"{escape(section.title)}:", markdown_table(section.headings, section.lines)]
    parts.append("\n".join(f"- {escape(note)}" for note in notes(table)))
    return "\n\n".join(parts).rstrip() + "\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of markdown whose cells are plain text."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(escape, line))} |" for line in lines)


def escape(text: str) -> str:
    """Return plain text as one line that means nothing else in Markdown."""
    return MARKUP.sub(r"\\\g<0>", text).replace("\n", " ")


def latex(table: Table) -> str:
    """Return the sections of the table as booktabs tabulars, each under its title, and the notes below."""
    head = f"% {table.name}: written by report.py; needs \\usepackage[T1]{{fontenc}} and \\usepackage{{booktabs}}"
    parts = [head, *map(_tabular, sections(table))]
    if found := notes(table):
        items = "\n".join(rf"  \item {escape_latex(note)}" for note in found)
        parts.append(f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}")
    return "\n\n".join(parts) + "\n"


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it stands; a sign unknown to pdflatex becomes its code point, `U+4E2D`."""
    return LATEX.sub(_sign, NEGATIVE.sub("\N{MINUS SIGN}", " ".join(text.split())))


def tidy_csv(table: Table) -> str:
    """Return `tidy_rows` as CSV; empty where there is nothing to say."""
    text = io.StringIO()
    paper = PAPER if any(row.reported for row in table.rows) else ()
    headings = ["metric", *MEAN, *PAIRED, *CONCLUDED, *DOCUMENTS, *WELCH, *paper]
    writer = csv.DictWriter(text, [*table.columns, *headings, "missed"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(tidy_rows(table))
    return text.getvalue()


def tidy_rows(table: Table) -> Iterator[dict[str, Any]]:
    """Yield one row per arm and metric, floats in full precision; a key is left out where there is nothing to say.

    `tokens_saved` comes after the metrics: its mean is the share of the baseline's tokens that is saved, `missed` the
    seeds that never reached the baseline's loss; that of `tokens_saved_by_slope` is in ln tokens. Where `scale` is ln,
    differences are of natural logarithms.
    """
    for row in table.rows:
        label = _texts(row.arm.label)
        for metric in table.metrics:
            yield label | _metric_line(row, metric, table.baseline)
        if row.tokens_to_loss:
            yield label | _tokens_line(row.tokens_to_loss, table.baseline)
            if slope := row.tokens_to_loss.by_slope:
                yield label | _slope_line(slope, table.baseline)
    for model in table.models:
        for metric in table.metrics:
            if (value := model.value(metric.key)) is not None:
                yield {table.columns[0]: model.name, "metric": metric.key, "mean": value, "n": 1}
    for row in table.pairs:
        for key, difference in row.differences.items():
            assert row.other
            yield _texts(row.arm.label) | {"metric": key} | _difference_line(difference, row.other.name)


def as_json(table: Table) -> dict[str, Any]:
    """Return every number of the table with the folders, seeds and values that it was made from."""
    return {
        "name": table.name,
        "baseline": table.baseline,
        "equivalence_margin": table.margin,
        "metrics": {metric.key: metric.title for metric in table.metrics},
        "arms": [_arm(row, table.metrics) for row in table.rows],
        "pairs": [
            {"arm": row.arm.name, "other": row.other.name, "differences": _differences(row)}
            for row in table.pairs
            if row.other
        ],
        "models": [{"folder": str(model.path), **model.facts, "values": model.analysed} for model in table.models],
        "without_result": [
            {"run": label, "folder": str(run.path), "seed": run.seed, "status": status, "error": error}
            for label, run in table.absent
            for status, error in [absence(run)]
        ],
        "missing": [{"run": label, "folder": folder} for folder, label in table.missing.items()],
        "notes": notes(table),
    }


def _metric_line(row: Row, metric: Metric, baseline: str | None) -> dict[str, Any]:
    summary, difference = row.summaries[metric.key], row.differences.get(metric.key)
    line: dict[str, Any] = {"metric": metric.key, "n": 0, "seeds": " ".join(map(str, row.arm.values(metric.key)))}
    if summary:
        line |= vars(summary)
    if difference:
        line |= _difference_line(difference, baseline)
    if metric.key in row.reported:
        line |= zip(PAPER, row.reported[metric.key], strict=True)
    return line


def _difference_line(difference: PairedDifference, baseline: str | None) -> dict[str, Any]:
    paired = (baseline, difference.scale, difference.mean, difference.low, difference.high, difference.pairs)
    line: dict[str, Any] = dict(zip(PAIRED, (*paired, difference.p, difference.p_holm, difference.effect), strict=True))
    line |= zip(CONCLUDED, (difference.detectable, difference.p_equivalent, difference.conclusion), strict=True)
    if difference.over_documents:
        line |= zip(DOCUMENTS, asdict(difference.over_documents).values(), strict=True)
    if difference.welch:
        line |= zip(WELCH, asdict(difference.welch).values(), strict=True)
    return line


def _slope_line(slope: SlopeSaving, baseline: str | None) -> dict[str, Any]:
    return {
        "metric": "tokens_saved_by_slope", "mean": slope.mean, "n": len(slope.savings),
        "seeds": " ".join(map(str, slope.savings)), "baseline": baseline, "scale": "ln", "low": slope.low,
        "high": slope.high,
    }  # fmt: skip


def _tokens_line(tokens: TokensToLoss, baseline: str | None) -> dict[str, Any]:
    return {
        "metric": "tokens_saved", "mean": tokens.saving, "n": len(tokens.shares),
        "seeds": " ".join(map(str, tokens.shares)), "baseline": baseline, "low": tokens.low, "high": tokens.high,
        "missed": " ".join(map(str, tokens.missed)),
    }  # fmt: skip


def _arm(row: Row, metrics: Sequence[Metric]) -> dict[str, Any]:
    return {
        "label": _texts(row.arm.label),
        "runs": [
            {
                "folder": str(run.path),
                "config_hash": run.spec.hash,
                "seed": run.seed,
                "values": {metric.key: run.value(metric.key) for metric in metrics},
            }
            for run in row.arm.runs
        ],
        "summaries": {key: summary and vars(summary) for key, summary in row.summaries.items()},
        "differences": _differences(row),
        "tokens_to_loss": row.tokens_to_loss and asdict(row.tokens_to_loss),
        "paper": {key: numbers._asdict() for key, numbers in row.reported.items()},
    }


def _differences(row: Row) -> dict[str, Any]:
    return {key: asdict(difference) for key, difference in row.differences.items()}


def _texts(label: Mapping[str, Cell]) -> dict[str, str | None]:
    return {column: None if cell.text == ABSENT else cell.text for column, cell in label.items()}


def _sign(found: re.Match[str]) -> str:
    """Return what LaTeX prints as the sign; two hyphens in a row would become a dash."""
    return "-{}" if found[0] == "-" else SIGNS.get(found[0], f"U+{ord(found[0]):04X}")


def _tabular(section: Section) -> str:
    columns = "l" * section.texts + "r" * (len(section.headings) - section.texts)
    lines = [
        rf"\noindent {escape_latex(section.title)}",
        "",
        rf"\noindent\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _row(section.headings),
        r"\midrule",
        *map(_row, section.lines),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    """Return a row of a tabular; a cell that begins with a bracket would be read as an option of the row before."""
    return (
        " & ".join(f"{{}}{escape_latex(cell)}" if cell.startswith(("[", "*")) else escape_latex(cell) for cell in cells)
        + r" \\"
    )
