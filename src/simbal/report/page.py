"""The page of a sweep, index.html: its tables and interactive figures in one file that needs no network.

A page shows texts from files that anybody may have written. The template escapes all of them, and the page's policy
lets a browser run the two scripts below and nothing else.
"""

import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from simbal.errors import UserError
from simbal.report import charts, figures, sections
from simbal.report.arms import Arm
from simbal.report.charts import Forest, Lines
from simbal.report.columns import ABSENT, Cell
from simbal.report.curves import MOST_ARMS, MOST_RUNS, NUM_COLORS, styles
from simbal.report.figures import Card
from simbal.report.notes import notes
from simbal.report.sections import Section
from simbal.report.table import LastSweep, Table
from simbal.runs.atomic import write_text
from simbal.runs.spec import result_keys

HERE = Path(__file__).parent
MOST_MEANS, MOST_COMPARED = 300, 100  # arms in the table of results, and in the tables of differences and tokens
MOST_ROWS = 250  # of a table
MOST_NUMBERS = 60_000  # of all curves together
FEWEST_POINTS, MOST_SEEDS = 16, 10  # of a line, and of an arm as single lines
MOST_OPEN = 12  # arms; with more, the figures of differences after the second are folded
SAID = 4  # arms that the first sentence names
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"  # as in page.html
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?")


def write(table: Table, folder: Path, running: bool = False) -> None:
    """Write index.html to `folder`, outputs/<name>; `UserError` if one of its files is broken."""
    write_text(folder / "index.html", html(table, folder, running))


def html(table: Table, folder: Path, running: bool = False) -> str:
    """Return the page of a table with runs in `folder`: the same text for the same folder.

    The page of a running sweep reloads itself.
    """
    cards = figures.cards(table, folder)
    shown = [row.arm for row in table.of_best(MOST_ARMS).rows]
    compared = table.of_best(MOST_COMPARED)
    means = table.of_best(MOST_MEANS)
    differences = _differences(compared)
    absent = sections.absent(table)
    scripts = [_bundle(), (HERE / "page.js").read_text(encoding="utf-8")]
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return _template().render(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:",
        scripts=[Markup(script) for script in scripts],
        charted=_charted(cards),
        running=running,
        table=table,
        command=LastSweep.of(folder).command,
        verdict=verdict(table),
        tiles=_tiles(table),
        means=sections.means(means, short=True),
        more_means=len(table.rows) - len(means.rows),
        without_result=replace(absent, rows=absent.rows[:MOST_ROWS]),
        more_without_result=len(absent.rows[MOST_ROWS:]),
        differences=differences,
        more_differences=len(sections.compared(table)) - len(differences.rows),
        tokens_to_loss=sections.tokens_to_loss(compared),
        more_compared=len(table.rows) - len(compared.rows),
        forests=[card for card in cards if isinstance(card.figure, Forest)],
        open_forests=2 if len(compared.compared) > MOST_OPEN else None,
        curves=[card for card in cards if card.figure and not isinstance(card.figure, Forest)],
        missing=[card for card in cards if not card.figure],
        shown=[arm.name for arm in shown],
        first_seeds=MOST_RUNS if any(len(arm.runs) > MOST_RUNS for arm in shown) else 0,
        styles=dict(zip([arm.name for arm in shown], styles([arm.name for arm in shown]), strict=True)),
        num_colors=NUM_COLORS,
        words=charts.CONCLUSIONS,
        concluded=_concluded(cards),
        config=_config_differences(shown),
        notes=notes(table),
        folder_link=sections.folder_link,
        sort_key=_sort_key,
    )


def verdict(table: Table) -> str:
    """Return what the first metric says about the arms in one sentence; nothing if none are compared."""
    for metric in table.metrics:
        found = [(row, row.differences[metric.key]) for row in table.compared if metric.key in row.differences]
        if not found:
            continue
        to = "" if table.pairs else f" vs. {table.baseline}"
        if len(found) <= SAID:
            texts = [f"{(one := figures.interval(table, row, metric)).arm} {one.text}" for row, _ in found]
        else:
            texts = [f"{count:,} {word}" for word, count in Counter(d.conclusion for _, d in found).most_common()]
        return f"{metric.title[0].upper()}{metric.title[1:]}{to}: {'; '.join(texts)}."
    return ""


def _bundle() -> str:
    """Return the scripts of Vega, Vega-Lite and Vega-Embed, which stay in the user's cache: making them takes 2 s."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = root / "simbal" / f"vega-lite-{charts.VERSION}-vl-convert-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    import vl_convert

    made = str(vl_convert.javascript_bundle(vl_version=charts.VERSION))  # type: ignore[call-arg]  # its stub is wrong
    with suppress(OSError, UserError):  # a page needs no cache
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, made)
    return made


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def _charted(cards: Sequence[Card]) -> Markup:
    """Return the specs of the figures with their data as JSON without angle brackets, to stand in a script element."""
    found = {card.name: card.figure for card in cards if card.figure}
    curves = [curve for figure in found.values() if isinstance(figure, Lines) for curve in figure.curves]
    columns = sum(1 + 2 * bool(curve.bands) + min(MOST_SEEDS, len(curve.by_seed)) for curve in curves)
    most_points = max(FEWEST_POINTS, min(charts.MOST_POINTS, MOST_NUMBERS // max(1, columns)))
    charted = {}
    for name, figure in found.items():
        thinned = (
            replace(figure, most_points=most_points, most_seeds=MOST_SEEDS) if isinstance(figure, Lines) else figure
        )
        charted[name] = {"spec": figure.chart(charts.SCREEN).to_dict(validate=False), "rows": thinned.rows()}
    content = {"config": charts.theme(charts.SCREEN.letters, FONT), "figures": charted}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _concluded(cards: Sequence[Card]) -> list[str]:
    """Return the words that the figures of differences use."""
    found = {one.conclusion for card in cards if isinstance(card.figure, Forest) for one in card.figure.intervals}
    return [word for word in charts.CONCLUSIONS if word in found]


def _tiles(table: Table) -> list[tuple[str, str]]:
    """Return the numbers for the head of the page, each after what it counts."""
    finished = [run for row in table.rows for run in row.arm.runs]
    absent = Counter(status for _, status, *_ in sections.absent(table).lines)
    tiles = [("arms", f"{len(table.rows):,}"), ("finished runs", f"{len(finished):,}")]
    tiles += [("Hugging Face models", f"{len(table.models):,}")] if table.models else []
    tiles += [(status, f"{count:,}") for status, count in absent.items()]
    if counts := [run.result["tokens"] for run in finished]:
        ends = dict.fromkeys((min(counts), max(counts)))
        tiles.append(("training tokens per run", " to ".join(f"{count:,}" for count in ends)))
    return tiles


def _differences(table: Table) -> Section:
    """Return the differences with the arm's name in each row; of very many arms, only for the first metrics."""
    fits = max(1, MOST_ROWS // max(1, len(table.compared)))
    compared = [metric for metric in table.metrics if any(metric.key in row.differences for row in table.compared)]
    section = sections.differences(replace(table, metrics=compared[:fits]))
    rows = [[Cell(arm), *row[1:]] for arm, row in zip(section.arms, section.rows, strict=True)]
    return replace(section, rows=rows)


def _config_differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys that differ between arms, each with its value in every arm."""
    configs = [result_keys(arm.runs[0].spec.written) for arm in arms]
    keys = dict.fromkeys(key for config in configs for key in config if key != "seed")
    values = {key: [json.dumps(config[key]) if key in config else ABSENT for config in configs] for key in keys}
    return [(key, each) for key, each in values.items() if len(set(each)) > 1]


def _sort_key(cell: Cell) -> Markup:
    """Return the attribute by which a column is sorted; none for a text that JavaScript reads as a number."""
    if cell.value is None or NUMBER.fullmatch(cell.text):
        return Markup()
    return Markup(' data-key="{}"').format(f"{cell.value:.6g}")
