"""Writes a table to table.md, table.tex, table.csv and table.json beside the runs that it was made from."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simbal.run_folder import write_json, write_text
from simbal.table.arms import ABSENT
from simbal.table.comparison import Row
from simbal.table.latex import latex
from simbal.table.metric import Metric
from simbal.table.sections import absence, sections
from simbal.table.table import Table

MARKUP = re.compile(r"[\\|*]|<(?=[A-Za-z/!?])")
MEAN = ("mean", "sd", "n", "seeds")
PAIRED = ("baseline", "difference", "low", "high", "pairs", "p", "p_holm", "d_z")
WELCH = ("welch_difference", "welch_df", "welch_p")
PAPER = ("paper_m", "paper_l")


def export(table: Table, folder: Path) -> None:
    """Write the four files, each atomically: two rounded for people, csv and json in full precision."""
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.tex", latex(table))
    write_text(folder / "table.csv", tidy_csv(table))
    write_json(folder / "table.json", as_json(table))


def markdown(table: Table) -> str:
    """GitHub markdown, the same tables as on the terminal."""
    parts = [f"# {escape(table.name)}"]
    for section in sections(table):
        parts += [f"{escape(section.title)}:", markdown_table(section.headings, section.rows)]
    parts.append("\n".join(f"- {escape(note)}" for note in table.notes))
    return "\n\n".join(parts).rstrip() + "\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are plain text."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(escape, line))} |" for line in lines)


def escape(text: str) -> str:
    """Plain text as one line that means nothing else in Markdown."""
    return MARKUP.sub(r"\\\g<0>", text).replace("\n", " ")


def tidy_csv(table: Table) -> str:
    """One line per arm and metric, floats in full precision; empty where there is nothing to say.

    `tokens_saved` comes after the metrics: its mean is the share of the baseline's tokens that is saved, `missed` the
    seeds that never reached the baseline's loss.
    """
    text = io.StringIO()
    paper = PAPER if any(row.reported for row in table.rows) else ()
    headings = ["metric", *MEAN, *PAIRED, *WELCH, *paper]
    writer = csv.DictWriter(text, [*table.columns, *headings, "missed"], lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        label = {column: None if value == ABSENT else value for column, value in row.arm.label.items()}
        for metric in table.metrics:
            writer.writerow(label | _metric_line(row, metric, table.baseline))
        if row.tokens_to_loss:
            writer.writerow(label | _tokens_line(row, table.baseline))
    return text.getvalue()


def _metric_line(row: Row, metric: Metric, baseline: str | None) -> dict[str, Any]:
    summary, difference = row.summaries[metric.key], row.differences.get(metric.key)
    line: dict[str, Any] = {"metric": metric.key, "n": 0, "seeds": " ".join(map(str, row.arm.values(metric.key)))}
    if summary:
        line |= asdict(summary)
    if difference:
        paired = (baseline, difference.mean, difference.low, difference.high, difference.pairs)
        line |= zip(PAIRED, (*paired, difference.p, difference.p_holm, difference.effect), strict=True)
        if difference.welch:
            line |= zip(WELCH, asdict(difference.welch).values(), strict=True)
    if metric.key in row.reported:
        line |= zip(PAPER, row.reported[metric.key], strict=True)
    return line


def _tokens_line(row: Row, baseline: str | None) -> dict[str, Any]:
    tokens = row.tokens_to_loss
    assert tokens
    return {
        "metric": "tokens_saved", "mean": tokens.saving, "n": len(tokens.shares),
        "seeds": " ".join(map(str, tokens.shares)), "baseline": baseline, "low": tokens.low, "high": tokens.high,
        "missed": " ".join(map(str, tokens.missed)),
    }  # fmt: skip


def as_json(table: Table) -> dict[str, Any]:
    """Every number of the table with the folders, seeds and values that it was made from."""
    return {
        "name": table.name,
        "baseline": table.baseline,
        "metrics": {metric.key: metric.title for metric in table.metrics},
        "arms": [_arm(row, table.metrics) for row in table.rows],
        "without_result": [
            {"run": label, "folder": str(run.path), "seed": run.seed, "status": status, "error": error}
            for label, run in table.absent
            for status, error in [absence(run)]
        ],
        "missing": [{"run": label, "folder": folder} for folder, label in table.missing.items()],
        "notes": table.notes,
    }


def _arm(row: Row, metrics: Sequence[Metric]) -> dict[str, Any]:
    return {
        "label": {column: None if text == ABSENT else text for column, text in row.arm.label.items()},
        "runs": [
            {
                "folder": str(run.path),
                "config_hash": run.spec.hash,
                "seed": run.seed,
                "values": {metric.key: run.value(metric.key) for metric in metrics},
            }
            for run in row.arm.runs
        ],
        "summaries": {key: summary and asdict(summary) for key, summary in row.summaries.items()},
        "differences": {key: asdict(paired) for key, paired in row.differences.items()},
        "tokens_to_loss": row.tokens_to_loss and asdict(row.tokens_to_loss),
        "paper": {key: numbers._asdict() for key, numbers in row.reported.items()},
    }
