"""Recompute the numbers of every study in results/ from its rows.csv: python -m results.tools.verify."""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from results.tools.pages import Pages, compare_lines, find_pages
from results.tools.rows import METRICS, check_json, read_rows, read_table, recompute
from simbal.report.columns import ABSENT, Cell
from simbal.report.comparison import Row
from simbal.report.render import escape, markdown_table
from simbal.report.sections import Section, differences, means, tokens_to_loss
from simbal.report.table import Table
from simbal.report.tokens_to_loss import SlopeSaving, TokensToLoss

SUMS = "SHA256SUMS"


def verify(results: Path) -> list[str]:
    """Return a message for each number that does not follow from rows.csv. Studies without rows.csv are skipped."""
    wrong, pages = check_sums(results), Pages(results)
    for folder in sorted(file.parent for file in results.glob("*/rows.csv")):
        study = pages.study(folder.name)
        rows = study.compared(study.table["baseline"])
        found = check_json(rows, study.table) or check_table(folder / "table.md", rows, study.table)
        wrong += [f"{folder.name}: {sentence}" for sentence in found]
    for page in find_pages(results):
        found = pages.check(page.read_text(encoding="utf-8"), page.parent.name)
        wrong += [f"{page.relative_to(results)}: {sentence}" for sentence in found]
    return wrong


def sums(results: Path) -> list[str]:
    """Return a line of SHA256SUMS for each CSV file of the studies, except those that still grow."""
    files = sorted(file for file in results.glob("*/*.csv") if not file.name.startswith("partial"))
    return [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(results)}" for file in files]


def write_sums(results: Path) -> None:
    """Write SHA256SUMS."""
    (results / SUMS).write_text("\n".join([*sums(results), ""]), encoding="utf-8")


def check_sums(results: Path) -> list[str]:
    """Return a message for each CSV file whose digest differs from SHA256SUMS."""
    kept, found = (results / SUMS).read_text(encoding="utf-8").splitlines(), sums(results)
    return [f"{line.split()[1]} differs from {SUMS}" for line in sorted({*kept} ^ {*found})]


def check_table(file: Path, names: Iterable[str], table: dict[str, Any]) -> list[str]:
    """Return a message for each line of table.md that does not follow from table.json with these arm `names`."""
    parts = sections_of(names, table)
    given = "\n".join(markdown_table(part.headings, part.lines) for part in parts).splitlines()
    return compare_lines(
        [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")], given
    )


def rewrite(folder: Path) -> None:
    """Compute the differences in table.json again from rows.csv, and write table.md."""
    file = folder / "table.json"
    arms, table = read_rows(folder), read_table(folder)
    for row, kept in zip(recompute(arms, table).values(), table["arms"], strict=True):
        kept["differences"] = {key: difference.numbers() for key, difference in row.differences.items()}
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    parts = [f"# {escape(table['name'])}"]
    for part in sections_of(arms, table):
        parts += [f"{escape(part.title)}:", markdown_table(part.headings, part.lines)]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def sections_of(names: Iterable[str], table: dict[str, Any]) -> list[Section]:
    """Return the sections of table.md that follow from table.json."""
    metrics = [METRICS[key] for key in table["metrics"]]
    rows = [_row(name, arm) for name, arm in zip(names, table["arms"], strict=True)]
    shown = Table(table["name"], [*table["arms"][0]["label"]], metrics, rows, table["baseline"], [])
    return [part for part in (means(shown), differences(shown), tokens_to_loss(shown)) if part.rows]


def _row(name: str, arm: dict[str, Any]) -> Row:
    """Return an arm of table.json as a row of a table."""
    found = json.loads(json.dumps(arm), object_hook=lambda one: SimpleNamespace(**one))
    found.name, found.seeds = name, [run.seed for run in found.runs]
    for run in found.runs:
        run.ngram_losses = {}
    found.label = {key: Cell(text or ABSENT) for key, text in arm["label"].items()}
    if tokens := arm["tokens_to_loss"]:
        by_slope = tokens["by_slope"] and SlopeSaving(**tokens["by_slope"])
        tokens = TokensToLoss(**tokens | {"by_slope": by_slope})
    return Row(found, vars(found.summaries), None, vars(found.differences), tokens)


if __name__ == "__main__":
    sys.exit("\n".join(verify(Path(__file__).parents[1])) or 0)
