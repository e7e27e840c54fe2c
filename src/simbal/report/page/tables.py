"""The tables of the page that are not those of the terminal, and the bars of differences."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from simbal.report import sections
from simbal.report.arms import Arm
from simbal.report.columns import ABSENT, NAMED, Cell
from simbal.report.comparison import Row
from simbal.report.sections import Section
from simbal.report.statistics import summarize
from simbal.report.table import Table
from simbal.runs.spec import result_keys

MOST_ROWS = 250  # of differences
MOST_MEANS, MOST_COMPARED = 300, 100  # arms whose numbers stand in the page, and whose differences do
PLAIN = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?")


@dataclass(frozen=True)
class Bar:
    """A difference with its interval, in percent of the width of a bar; zero is at 50."""

    low: float
    mean: float
    high: float
    clear: bool  # the interval does not contain zero


def differences(table: Table) -> tuple[Section, list[Bar | None], int]:
    """Return the differences to the baseline with the rows of a metric together, the bar of each row, and how many
    rows are left out: where there are very many, only the first metrics have theirs.
    """
    every = len(sections.compared(table))
    table = table.of_best(MOST_COMPARED)
    section, compared = sections.differences(table), sections.compared(table)
    by_metric = {metric.key: [row for row, m in compared if m is metric] for metric in table.metrics}
    bars = {key: iter(_bars(rows, key)) for key, rows in by_metric.items()}
    order = sorted(range(len(compared)), key=lambda place: table.metrics.index(compared[place][1]))
    ends = [*accumulate(map(len, by_metric.values()))]
    kept = order[: max([end for end in ends if end <= MOST_ROWS], default=min(ends, default=0))]
    arms = [section.arms[place] for place in kept]
    rows = [[Cell(arm), *section.rows[place][1:]] for arm, place in zip(arms, kept, strict=True)]
    shown = [next(bars[compared[place][1].key]) for place in kept]
    return Section(section.title, section.headings, rows, section.texts, arms), shown, every - len(kept)


@dataclass(frozen=True)
class Folders:
    """The run folders of an arm."""

    arm: str
    ppl: Cell  # their mean
    links: list[tuple[int, str]]  # to the folder of each seed


def folders(table: Table) -> list[Folders]:
    """Return the run folders of each arm."""
    ppl = NAMED["ppl"]
    return [
        Folders(
            row.arm.name,
            sections.mean_cell(ppl.number, summarize([*row.arm.values(ppl.key).values()])),
            [(run.seed, sections.folder_link(run)) for run in row.arm.runs],
        )
        for row in table.rows
    ]


def sort_key(cell: Cell) -> Markup:
    """Return the attribute by which a column is sorted; none for a text that JavaScript reads as a number."""
    if cell.value is None or PLAIN.fullmatch(cell.text):
        return Markup()
    return Markup(' data-key="{}"').format(f"{cell.value:.6g}")


def config_differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys that differ between these arms, each with its value in every arm."""
    configs = [result_keys(arm.runs[0].spec.written) for arm in arms]
    keys = dict.fromkeys(key for config in configs for key in config if key != "seed")
    values = {key: [json.dumps(config[key]) if key in config else ABSENT for config in configs] for key in keys}
    return [(key, each) for key, each in values.items() if len(set(each)) > 1]


def _bars(rows: Sequence[Row], key: str) -> list[Bar | None]:
    """Return the bar of a metric in each row, None without an interval; the widest interval fills its bar."""
    found = [row.differences[key] for row in rows]
    reach = max((max(abs(d.low), abs(d.high)) for d in found if d.low is not None and d.high is not None), default=0)

    def percent(value: float) -> float:
        return round(50 + 48 * value / reach, 1)

    return [
        None
        if d.low is None or d.high is None or not reach
        else Bar(percent(d.low), percent(d.mean), percent(d.high), d.low > 0 or d.high < 0)
        for d in found
    ]
