"""The tables of the page that are not those of the terminal, and the bars of differences."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from simbal.report import sections
from simbal.report.arms import Arm
from simbal.report.columns import ABSENT, NAMED, Cell, number_cell
from simbal.report.comparison import Row
from simbal.report.sections import Section
from simbal.report.table import Table
from simbal.runs.spec import result_keys


@dataclass(frozen=True)
class Bar:
    """A difference with its interval, in percent of the width of a bar; zero is at 50."""

    low: float
    mean: float
    high: float
    clear: bool  # the interval does not contain zero


def differences(table: Table) -> tuple[Section, list[Bar | None]]:
    """Return the differences to the baseline with the rows of a metric together, and the bar of each row."""
    section, compared = sections.differences(table), sections.compared(table)
    by_metric = {metric.key: [row for row, m in compared if m is metric] for metric in table.metrics}
    bars = {key: iter(_bars(rows, key)) for key, rows in by_metric.items()}
    order = sorted(range(len(compared)), key=lambda place: table.metrics.index(compared[place][1]))
    arms = [section.arms[place] for place in order]
    rows = [[Cell(arm), *section.rows[place][1:]] for arm, place in zip(arms, order, strict=True)]
    shown = [next(bars[compared[place][1].key]) for place in order]
    return Section(section.title, section.headings, rows, section.texts, arms), shown


def runs(table: Table) -> Section:
    """Return the table of finished runs, a row for each, with a link to its folder."""
    metrics = [NAMED["ppl"], NAMED["tokens_per_second"]]
    rows, arms = [], []
    for row in table.rows:
        for run in row.arm.runs:
            folder = Cell(run.path.name, href=sections.folder_link(run))
            numbers = [number_cell(metric.number, run.value(metric.key)) for metric in metrics]
            rows.append([Cell(row.arm.name), folder, number_cell("{}", run.seed), *numbers])
            arms.append(row.arm.name)
    return Section("runs", ["arm", "folder", "seed", *(metric.heading for metric in metrics)], rows, 2, arms)


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
        return round(50 + 48 * value / reach, 2)

    return [
        None
        if d.low is None or d.high is None or not reach
        else Bar(percent(d.low), percent(d.mean), percent(d.high), d.low > 0 or d.high < 0)
        for d in found
    ]
