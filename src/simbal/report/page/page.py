"""Writes the page of a sweep, index.html: tables, figures and links in one file that needs no network.

Every text comes from files that anybody may have written: the template escapes them all, and the only markup that goes
in as it is are the figures, which matplotlib has escaped. A browser runs no script but those whose digests the page's
policy has.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from simbal.files.disk import write_text
from simbal.report import sections
from simbal.report.arms import Arm
from simbal.report.notes import notes
from simbal.report.page import tables
from simbal.report.page.cards import Card, cards
from simbal.report.page.chart import curves_json, thinned
from simbal.report.page.series import MOST_RUNS, read
from simbal.report.page.styles import COLORS, MOST_ARMS
from simbal.report.page.svg import inline, svg
from simbal.report.table import LastSweep, Table

SCRIPTS = ("sort.js", "uplot/uPlot.iife.min.js", "curves.js")
MOST_NUMBERS = 12_000  # of all curves
HERE = Path(__file__).parent


def write(table: Table, folder: Path, running: bool = False) -> None:
    """Write index.html to `folder`, outputs/<name>; `UserError` if one of its files is broken."""
    write_text(folder / "index.html", html(table, folder, running))


def html(table: Table, folder: Path, running: bool = False) -> str:
    """Return the page of a table whose runs lie in `folder`; the same text for the same folder.

    The page of a running sweep reloads itself.
    """
    shown = figure_arms(table)
    means, compared = table.of_best(tables.MOST_MEANS), table.of_best(tables.MOST_COMPARED)
    absent = sections.absent(table)
    differences, bars, left_out = tables.differences(table)
    drawn = read(shown, table.baseline)
    found = cards(drawn, f"{folder}")
    charts = dict(thinned([(card.name, card.chart) for card in found if card.chart], MOST_NUMBERS))
    figures = [replace(card, shows=charts.get(card.name, card.shows)) for card in found if card.shows]
    return render(
        SCRIPTS,
        running=running,
        table=table,
        notes=notes(table),
        command=LastSweep.of(folder).command,
        tiles=_tiles(table),
        means=sections.means(means, short=True),
        more_means=len(table.rows) - len(means.rows),
        differences=differences,
        bars=bars,
        left_out=left_out,
        sort_key=tables.sort_key,
        tokens_to_loss=sections.tokens_to_loss(compared),
        more_compared=len(table.rows) - len(compared.rows),
        without_result=replace(absent, rows=absent.rows[: tables.MOST_ROWS]),
        more_without_result=len(absent.rows[tables.MOST_ROWS :]),
        folders=tables.folders(table),
        config=tables.config_differences(shown),
        figures=[(card, inline(svg(card.figure(), card.name), card.name, card.title)) for card in figures],
        missing=[card for card in found if not card.shows],
        shown=shown,
        first_seeds=MOST_RUNS if any(len(arm.runs) > MOST_RUNS for arm in shown) else 0,
        styles={arm.name: arm.style for arm in drawn},
        num_colors=len(COLORS),
        curves=Markup(curves_json([*charts.items()])),
    )


def cards_of(table: Table, folder: Path) -> list[Card]:
    """Return the figures of the page, those for which there are data."""
    return [card for card in cards(read(figure_arms(table), table.baseline), f"{folder}") if card.shows]


def figure_arms(table: Table) -> list[Arm]:
    """Return the arms that figures show: all, or of too many the best by loss and what they are compared with."""
    return [row.arm for row in table.of_best(MOST_ARMS).rows]


def _tiles(table: Table) -> list[tuple[str, str]]:
    """Return the numbers for the head of the page, each after what it counts."""
    finished = [run for row in table.rows for run in row.arm.runs]
    absent = Counter(status for _, status, *_ in sections.absent(table).lines)
    tiles = [("arms", f"{len(table.rows):,}"), ("finished runs", f"{len(finished):,}")]
    tiles += [("models of Hugging Face", f"{len(table.models):,}")] if table.models else []
    tiles += [(status, f"{count:,}") for status, count in absent.items()]
    counts = [run.result["tokens"] for run in finished]
    if counts:
        spread = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        tiles.append(("training tokens per run", spread))
    return tiles


def render(scripts: Sequence[str], **values: Any) -> str:
    """Return the page with scripts of this package and values for the template's variables."""
    sources = [_source(name) for name in scripts]
    digests = [b64encode(sha256(source.encode()).digest()).decode() for source in sources]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return _template().render(
        css=_source("style.css") + _source("uplot/uPlot.min.css"),
        scripts=sources,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:",
        licence=_source("uplot/LICENSE"),
        **values,
    )


@cache
def _source(name: str) -> Markup:
    """Return a file of this package, to stand in the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html")
