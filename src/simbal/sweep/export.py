"""Writes a table to table.md, table.csv and table.json beside the runs that it was made from."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simbal.run_folder import write_json, write_text
from simbal.sweep.arms import ABSENT
from simbal.sweep.metric import Metric
from simbal.sweep.table import Row, Table
from simbal.sweep.terminal import absence, difference_cells, seed_spans


def export(table: Table, folder: Path) -> None:
    """Write the three files, each atomically: markdown rounded for people, the others in full precision."""
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.csv", tidy_csv(table))
    write_json(folder / "table.json", as_json(table))


def markdown(table: Table) -> str:
    """GitHub markdown, the same tables as on the terminal."""
    parts = [f"# {table.name}"]
    if table.rows:
        headings = [*table.columns, "n", "seeds", *(metric.heading for metric in table.metrics)]
        parts.append(_markdown_table(headings, [_mean_cells(row, table.metrics) for row in table.rows]))
    differences = [
        [row.arm.name, metric.heading, *difference_cells(metric, row.differences[metric.key])]
        for row in table.rows
        for metric in table.metrics
        if metric.key in row.differences
    ]
    if differences:
        parts.append(f"Paired difference to {table.baseline} on the seeds that both have:")
        parts.append(_markdown_table(["arm", "metric", "difference", "95% interval", "pairs"], differences))
    if table.absent:
        rows = [[f"{label} seed={run.seed}", *absence(run.record), run.path.name] for label, run in table.absent]
        parts.append("Runs without a result:")
        parts.append(_markdown_table(["run", "status", "error", "folder"], rows))
    parts.append("\n".join(f"- {_escape(note)}" for note in table.notes))
    return "\n\n".join(parts).rstrip() + "\n"


def _mean_cells(row: Row, metrics: Sequence[Metric]) -> list[str]:
    means = [metric.write(row.summaries[metric.key]) for metric in metrics]
    return [*row.arm.label.values(), str(len(row.arm.runs)), seed_spans(row.arm.seeds), *means]


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def tidy_csv(table: Table) -> str:
    """One line per arm and metric, floats in full precision; empty where there is nothing to say."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ["metric", "mean", "sd", "n", "seeds", "baseline", "difference", "low", "high", "pairs"]
    writer.writerow([*table.columns, *numbers])
    for row in table.rows:
        for metric in table.metrics:
            summary, difference = row.summaries[metric.key], row.differences.get(metric.key)
            mean = [summary.mean, summary.sd, summary.n] if summary else [None, None, 0]
            seeds = " ".join(map(str, row.arm.values(metric.key)))
            paired = [table.baseline, *asdict(difference).values()] if difference else [None] * 5
            label = [None if text == ABSENT else text for text in row.arm.label.values()]
            writer.writerow([*label, metric.key, *mean, seeds, *paired])
    return text.getvalue()


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
            for status, error in [absence(run.record)]
        ],
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
    }
