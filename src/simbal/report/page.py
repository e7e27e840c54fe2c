"""The page of a sweep, index.html: tables and interactive figures in one file that works offline.

The page shows text from files. The template escapes it, and the page's content security policy allows only the two
scripts below.
"""

import json
import os
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from simbal.errors import UserError
from simbal.report import charts, figures, sections
from simbal.report.arms import Arm, seed_ranges
from simbal.report.charts import Forest, Lines
from simbal.report.collect import last_sweep
from simbal.report.columns import ABSENT
from simbal.report.curves import MOST_ARMS, NUM_COLORS, arm_styles
from simbal.report.figures import Card
from simbal.report.notes import notes
from simbal.report.table import Table
from simbal.runs.atomic import write_json, write_text
from simbal.runs.spec import result_keys

HERE = Path(__file__).parent
TEMPLATES = Environment(
    loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
SUMMARY_FILE = "summary.json"  # in outputs/<name>: the line of the sweep in outputs/index.html
STATIC = "default-src 'none'; style-src 'unsafe-inline'; img-src data:;"  # the content security policy
MOST_TABLE_ARMS = 60  # arms in tables
MOST_NUMBERS = 60_000  # numbers in all curves together
FEWEST_POINTS, MOST_SEEDS = 16, 10  # points per line, and seeds per arm drawn as separate lines
MOST_OPEN = 12  # with more arms, only the first two figures of differences are expanded
MOST_IN_VERDICT = 4  # arms that the verdict names
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"  # as in page.html


def write(table: Table, folder: Path, running: bool = False) -> None:
    """Write index.html into `folder`, outputs/<name>, and the list of all sweeps next to the folder.

    The list is written if the folder is where its runs were trained, because a copy may be next to unrelated files.

    Raises:
        UserError: a file of curves is broken.
    """
    write_text(folder / "index.html", html(table, folder, running))
    write_json(folder / SUMMARY_FILE, summary(table, folder))
    runs = [*(run for row in table.rows for run in row.arm.runs), *(run for _, run in table.absent)]
    if runs and Path(runs[0].spec.config.output_dir).resolve() == folder.resolve().parent:
        write_list(folder.resolve().parent)


def summary(table: Table, folder: Path) -> dict[str, Any]:
    """Return what the list of sweeps shows of a sweep: name, arms, seeds, verdict and the end of its last run."""
    runs = [run for row in table.rows for run in row.arm.runs]
    return {
        "name": folder.resolve().name,
        "arms": len(table.rows),
        "seeds": seed_ranges([*{run.seed for run in runs}]),
        "verdict": verdict(table),
        "when": max((run.result.get("ended", "") for run in runs), default=""),
    }


def write_list(outputs: Path) -> None:
    """Write index.html into `outputs`, a list of the sweeps in it."""
    sweeps = []
    for file in outputs.glob(f"*/{SUMMARY_FILE}"):
        with suppress(OSError, ValueError):
            sweeps.append(orjson.loads(file.read_bytes()))
    sweeps.sort(key=lambda sweep: (sweep["when"], sweep["name"]), reverse=True)
    template = TEMPLATES.get_template("sweeps.html")
    write_text(
        outputs / "index.html", template.render(policy=STATIC, running=False, words=charts.CONCLUSIONS, sweeps=sweeps)
    )


def html(table: Table, folder: Path, running: bool = False) -> str:
    """Return the page of a table: the same bytes for the same folder. With `running`, the page reloads periodically."""
    cards = figures.cards(table, folder)
    shown = table.best_arms(MOST_TABLE_ARMS)
    figure_arms = [row.arm for row in table.best_arms(MOST_ARMS).rows]
    names = [arm.name for arm in figure_arms]
    words = {one.conclusion for card in cards if isinstance(card.figure, Forest) for one in card.figure.intervals}
    scripts = [_vega_scripts(), (HERE / "page.js").read_text(encoding="utf-8")]
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return TEMPLATES.get_template("page.html").render(
        policy=f"{STATIC} script-src {allowed};",
        scripts=[Markup(script) for script in scripts],
        charted=_chart_data(cards),
        running=running,
        table=table,
        command=last_sweep(folder)[0],
        verdict=verdict(table),
        tiles=_tiles(table),
        means=sections.means(shown, short=True),
        absent=sections.absent(table),
        differences=sections.differences(shown),
        tokens_to_loss=sections.tokens_to_loss(shown),
        more_arms=len(table.rows) - len(shown.rows),
        forests=[card for card in cards if isinstance(card.figure, Forest)],
        open_forests=2 if len(shown.compared) > MOST_OPEN else None,
        curves=[card for card in cards if card.figure and not isinstance(card.figure, Forest)],
        missing=[card for card in cards if not card.figure],
        figure_arms=names,
        styles=dict(zip(names, arm_styles(names), strict=True)),
        num_colors=NUM_COLORS,
        words=charts.CONCLUSIONS,
        concluded=[word for word in charts.CONCLUSIONS if word in words],
        config=_config_differences(figure_arms),
        notes=notes(table),
        folder_link=sections.folder_link,
    )


def verdict(table: Table) -> str:
    """Return the conclusions for the first metric in one sentence; empty if no arms are compared."""
    measured = (metric for metric in table.metrics if any(metric.key in row.differences for row in table.compared))
    if (metric := next(measured, None)) is None:
        return ""
    shown = [row for row in table.compared if metric.key in row.differences and row.differences[metric.key].conclusion]
    if not shown:
        return ""
    intervals = [figures.interval(table, row, metric) for row in shown]
    texts = [f"{one.arm} {one.text}" for one in intervals]
    if len(intervals) > MOST_IN_VERDICT:
        counts = Counter(one.conclusion for one in intervals)
        texts = [f"{count:,} {word}" for word, count in counts.most_common()]
    to = "" if table.pairs else f" vs. {table.baseline}"
    return f"{metric.title[0].upper()}{metric.title[1:]}{to}: {'; '.join(texts)}."


def _vega_scripts() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script. Bundling takes 2 s, so it is cached in the user's cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = root / "simbal" / f"vega-lite-{charts.VERSION}-vl-convert-{version('vl-convert-python')}.js"
    with suppress(OSError, UserError):
        return file.read_text(encoding="utf-8")
    bundle = str(vl_convert.javascript_bundle(vl_version=charts.VERSION))  # type: ignore[call-arg]  # the stub is wrong
    with suppress(OSError, UserError):  # the cache may be read-only
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, bundle)
    return bundle


def _chart_data(cards: Sequence[Card]) -> Markup:
    """Return specs and data of the figures as JSON without angle brackets, for a script element."""
    figures_by_name = {card.name: card.figure for card in cards if card.figure}
    curves = [curve for figure in figures_by_name.values() if isinstance(figure, Lines) for curve in figure.curves]
    columns = sum(1 + 2 * bool(curve.bands) + min(MOST_SEEDS, len(curve.by_seed)) for curve in curves)
    most_points = max(FEWEST_POINTS, min(charts.MOST_POINTS, MOST_NUMBERS // max(1, columns)))
    charted = {}
    for name, figure in figures_by_name.items():
        small = replace(figure, most_points=most_points, most_seeds=MOST_SEEDS) if isinstance(figure, Lines) else figure
        charted[name] = {"spec": figure.chart(charts.SCREEN).to_dict(validate=False), "rows": small.rows()}
    content = {"config": charts.theme(charts.SCREEN.letters, FONT), "figures": charted}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _tiles(table: Table) -> list[tuple[str, str]]:
    """Return the names and values of the summary numbers at the top of the page."""
    tokens = [run.result["tokens"] for row in table.rows for run in row.arm.runs]
    counts = {"arms": len(table.rows), "finished runs": len(tokens)}
    counts |= {"Hugging Face models": len(table.models)} if table.models else {}
    counts |= Counter(status for _, status, *_ in sections.absent(table).lines)
    tiles = [(name, f"{count:,}") for name, count in counts.items()]
    if tokens:
        ends = dict.fromkeys((min(tokens), max(tokens)))
        tiles.append(("training tokens per run", " to ".join(f"{count:,}" for count in ends)))
    return tiles


def _config_differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys that differ between arms, with the value in each arm."""
    configs = [result_keys(arm.runs[0].spec.written) for arm in arms]
    keys = dict.fromkeys(key for config in configs for key in config if key != "seed")
    values = {key: [json.dumps(config[key]) if key in config else ABSENT for config in configs] for key in keys}
    return [(key, each) for key, each in values.items() if len(set(each)) > 1]
