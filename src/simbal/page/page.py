"""index.html of a sweep: tables, figures and links in one file that needs no network.

Every text comes from files that anybody may have written: the template escapes them all, and the only markup that goes
in as it is are the figures, which matplotlib has escaped.
"""

from collections import Counter
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from simbal import strict_json
from simbal.errors import UserError
from simbal.page import tables
from simbal.page.cards import Card, cards
from simbal.page.figures import COLORS, MOST_ARMS
from simbal.page.sensitivity import sensitivity
from simbal.page.series import read
from simbal.page.svg import inline, svg
from simbal.printable import printable
from simbal.run_folder import write_text
from simbal.table import sections
from simbal.table.arms import Arm
from simbal.table.comparison import Row
from simbal.table.table import Table

HERE = Path(__file__).parent


def write(table: Table, folder: Path) -> None:
    """Write index.html into `folder`, outputs/<name>; `UserError` if one of its files is broken."""
    write_text(folder / "index.html", html(table, folder))


def html(table: Table, folder: Path) -> str:
    """The page of a table whose runs lie in `folder`; the same text for the same folder."""
    shown = figure_arms(table)
    found = cards(read(shown), sensitivity([row.arm for row in table.rows]), f"{folder}")
    text = _template().render(
        table=table,
        command=_command(folder / "sweep.json"),
        tiles=_tiles(table),
        means=tables.means(table),
        differences=tables.differences(table),
        tokens_to_loss=tables.tokens_to_loss(table),
        without_result=tables.without_result(table),
        runs=tables.runs(table),
        config=tables.config_differences(shown),
        figures=[(card, _markup(card)) for card in found if card.figure is not None],
        missing=[card for card in found if card.figure is None],
        shown=shown,
        styles={arm.name: style for style, arm in enumerate(shown)},
        num_colors=len(COLORS),
        css=_source("style.css"),
        js=_source("sort.js"),
    )
    return printable(text)


def figure_arms(table: Table) -> list[Arm]:
    """Those that the figures show: all, or where they are too many the baseline's and those of the lowest loss."""

    def rank(row: Row) -> tuple[bool, float]:
        losses = row.arm.values("val/loss").values()
        return row.arm.balancing != table.baseline, sum(losses) / len(losses) if losses else float("inf")

    best = sorted(table.rows, key=rank)[:MOST_ARMS]
    return [row.arm for row in table.rows if row in best]


def _markup(card: Card) -> Markup:
    assert card.figure is not None
    return inline(svg(card.figure, card.name), card.name, card.title)


def _tiles(table: Table) -> list[tuple[str, str]]:
    """Numbers for the head of the page, each with what it counts."""
    finished = [run for row in table.rows for run in row.arm.runs]
    absent = Counter(status for _, status, *_ in sections.absent(table).rows)
    tiles = [("arms", f"{len(table.rows):,}"), ("finished runs", f"{len(finished):,}")]
    tiles += [(status, f"{count:,}") for status, count in absent.items()]
    counts = [run.result["tokens"] for run in finished]
    if counts:
        spread = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        tiles.append(("training tokens per run", spread))
    return tiles


def _command(file: Path) -> str:
    """What sweep.json says was typed; empty without the file."""
    if not file.exists():
        return ""
    try:
        command = strict_json.parse(file.read_bytes())["command"]
    except (OSError, ValueError, KeyError, TypeError):
        command = None
    if not isinstance(command, str):
        raise UserError(f"{file} is broken: delete it; the runs in {file.parent} need it no more")
    return command


def _source(name: str) -> Markup:
    """A file of this package, to stand in the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html")
