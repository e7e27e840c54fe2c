"""Writes the page of a sweep, index.html: tables, figures and links in one file that needs no network.

Every text comes from files that anybody may have written: the template escapes them all, and the only markup that goes
in as it is are the figures, which matplotlib has escaped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from simbal.files.disk import write_text
from simbal.report import sections
from simbal.report.arms import Arm
from simbal.report.notes import notes
from simbal.report.page import tables
from simbal.report.page.cards import Card, cards
from simbal.report.page.chart import Chart, curves_json, thinned
from simbal.report.page.figures import count
from simbal.report.page.heat import heat_maps, scale
from simbal.report.page.sensitivity import sensitivity
from simbal.report.page.series import MOST_RUNS, ShownArm, read
from simbal.report.page.styles import COLORS, MOST_ARMS
from simbal.report.page.svg import inline, svg
from simbal.report.page.template import render
from simbal.report.table import LastSweep, Table

SCRIPTS = ("sort.js", "uplot/uPlot.iife.min.js", "curves.js")

# numbers of all curves, of some 8 bytes each: for the script, and in static figures, which are read where none runs
MOST_NUMBERS, MOST_DRAWN = 18_000, 9_000


def write(table: Table, folder: Path) -> None:
    """Write index.html into `folder`, outputs/<name>; `UserError` if one of its files is broken."""
    write_text(folder / "index.html", html(table, folder))


def html(table: Table, folder: Path) -> str:
    """Return the page of a table whose runs lie in `folder`; the same text for the same folder."""
    shown = figure_arms(table)
    means, compared = table.of_best(tables.MOST_MEANS), table.of_best(tables.MOST_COMPARED)
    absent, folders = sections.absent(table), tables.folders(table)
    differences, bars, left_out = tables.differences(table)
    drawn = read(shown, table.baseline)
    found = _cards(table, drawn, folder)
    return render(
        "template.html",
        SCRIPTS,
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
        folders=folders,
        runs=None if folders else tables.runs(table),
        config=tables.config_differences(shown),
        figures=_drawn([card for card in found if card.shows]),
        heat=heat_maps(drawn),
        heat_scale=scale(),
        count=count,
        missing=[card for card in found if not card.shows],
        shown=shown,
        first_seeds=MOST_RUNS if any(len(arm.runs) > MOST_RUNS for arm in shown) else 0,
        styles={arm.name: arm.style for arm in drawn},
        num_colors=len(COLORS),
        curves=Markup(curves_json(thinned(_charts(found), MOST_NUMBERS))),
    )


def cards_of(table: Table, folder: Path) -> list[Card]:
    """Return the figures of the page, those for which there are data."""
    return [card for card in _cards(table, read(figure_arms(table), table.baseline), folder) if card.shows]


def figure_arms(table: Table) -> list[Arm]:
    """Return the arms that figures show: all, or of too many the best by loss and what they are compared with."""
    return [row.arm for row in table.of_best(MOST_ARMS).rows]


def _cards(table: Table, drawn: Sequence[ShownArm], folder: Path) -> list[Card]:
    return cards(drawn, sensitivity([row.arm for row in table.rows], table.baseline), f"{folder}")


def _charts(found: Sequence[Card]) -> list[tuple[str, Chart]]:
    return [(card.name, card.chart) for card in found if card.chart]


def _drawn(found: Sequence[Card]) -> list[tuple[Card, Markup]]:
    """Return the cards with their static figures."""
    thin = dict(thinned(_charts(found), MOST_DRAWN))
    return [(card, _markup(replace(card, shows=thin.get(card.name, card.shows)))) for card in found]


def _markup(card: Card) -> Markup:
    return inline(svg(card.figure(), card.name), card.name, card.title)


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
