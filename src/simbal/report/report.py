"""Reports on a folder of runs: collects, compares, writes the table to the folder and prints it.

It is what report.py does, and the end of a sweep.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from simbal.console import console
from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report import export, two_folders
from simbal.report.collect import Run, collect
from simbal.report.columns import choose, named_by_runs
from simbal.report.models import MeasuredModel, has_runs, measured_models
from simbal.report.power import power_section
from simbal.report.table import LastSweep, Table, build
from simbal.report.terminal import Layout, show, show_fitting
from simbal.runs.record import is_number

KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "baseline": (lambda value: isinstance(value, str), "the balancing or the arm that differences are taken from"),
    "compare": (lambda value: value == "all", "all, for every two arms"),
    "columns": (lambda value: isinstance(value, list), "a list such as [ppl,min_pes]"),
    "paper": (lambda value: isinstance(value, bool), "true or false"),
    "power": (lambda value: isinstance(value, bool), "true or false"),
    "figures": (lambda value: isinstance(value, bool), "true or false"),
    "explain": (lambda value: isinstance(value, bool), "true or false"),
    "equivalence_margin": (lambda value: is_number(value) and value > 0, "a number above 0, in nats per token"),
}


def report(
    folder: Path,
    baseline: str | None = None,
    columns: Sequence[str] | None = None,
    paper: bool = False,
    equivalence_margin: float | None = None,
    compare: str | None = None,
    power: bool = False,
    figures: bool = False,
    explain: bool = False,
) -> None:
    """Print the table of the runs and models in `folder`, and write table.md, .tex, .csv, .json and index.html there.

    Args:
        folder: outputs/<name>.
        baseline: the balancing or the arm to compare with; None takes the one that the runs' own configs name.
        columns: names of numbers of the runs or of their analyses; None takes those that the runs' own configs name, or
            the usual ones.
        paper: set what the paper reports of the same strategies beside each number.
        equivalence_margin: nats per token; None takes the one that the runs' own configs name.
        compare: `all` compares every two arms.
        power: also print how many more seeds would decide each comparison; it stands in no file.
        figures: also write the page's figures as files for a paper, to figures/; they take seconds.
        explain: also print how numbers are defined and compared, which the files have.

    Raises:
        UserError: as `collect`, `choose`, `LastSweep.of` and `build` do, and for a baseline that no arm is.
    """
    table = read_table(folder, baseline, columns, paper, equivalence_margin, compare == "all")
    export.export(table, folder)
    from simbal.report import page  # altair takes a third of a second to import

    page.write(table, folder)
    if figures:
        from simbal.report.figures import cards, write_figures

        write_figures(cards(table, folder), folder)
    out = console()
    if power:
        show_fitting([([], power_section(table))], out)
    show(table, out, explain)
    more = ", figures/" if figures else ""
    out.print(f"written: {folder / 'table.md'}, table.tex, table.csv, table.json{more} and index.html", soft_wrap=True)


def read_table(
    folder: Path,
    baseline: str | None = None,
    columns: Sequence[str] | None = None,
    paper: bool = False,
    equivalence_margin: float | None = None,
    pairs: bool = False,
) -> Table:
    """Return the table of the runs in `folder`; arguments and errors are those of `report`."""
    models = measured_models(folder)
    runs = collect(folder) if has_runs(folder) or not models else []
    missing = LastSweep.of(folder).never_started({run.path.name for run in runs})
    metrics = _metrics(columns, runs, models)
    table = build(folder.resolve().name, runs, baseline, metrics, paper, missing, equivalence_margin, pairs, models)
    _check_baseline(table, runs)
    return table


def report_both(
    first: Path,
    second: Path,
    baseline: str | None = None,
    columns: Sequence[str] | None = None,
    paper: bool = False,
    equivalence_margin: float | None = None,
    compare: str | None = None,
    power: bool = False,
    figures: bool = False,
    explain: bool = False,
) -> None:
    """Print what differs between two sweeps or runs, and the table of both; nothing is written.

    Args:
        first: outputs/<name>, or a run's folder.
        second: another; differences are of it minus the first, where both have an arm.
        baseline: as for `report`; None compares the arms that both have with each other, if there are any.
        columns: as for `report`, like the others.
        paper: see there.
        equivalence_margin: see there.
        compare: see there.
        power: see there.
        figures: of one folder alone.
        explain: see there.

    Raises:
        UserError: as `report` does, and for runs that cannot be compared, after what differs is printed.
    """
    if figures:
        raise UserError("figures=true draws one folder: name it alone")
    sides = two_folders.read_sides(first, second)
    out = console()
    if (found := two_folders.what_differs(*sides)).rows:
        out.print(found.title, style="bold", soft_wrap=True)  # a grid would break it at its own width
        out.print(Layout(replace(found, title="")).grid())
    else:
        out.print(f"{sides[0].name} and {sides[1].name} differ in nothing that is recorded", soft_wrap=True)
    if reason := two_folders.why_not(*sides):
        raise UserError(reason)
    runs = [run for side in sides for run in side.runs]
    table = two_folders.build_both(
        *sides, baseline, _metrics(columns, runs), paper, equivalence_margin, compare == "all"
    )
    _check_baseline(table, runs)
    if power:
        show_fitting([([], power_section(table))], out)
    show(table, out, explain, in_files=False)


def report_keys(lines: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` lines by key; `UserError` for an unknown key or a value of another kind."""
    keys: dict[str, Any] = {}
    for line in lines:
        key, equals, text = line.partition("=")
        if not equals or key not in KINDS:
            what = "" if equals or line.startswith("-") else " is no folder, and no key"
            raise UserError(f"{line}{what}: give {', '.join(f'{name}=' for name in KINDS)}")
        allowed, meaning = KINDS[key]
        try:
            read = float if key == "equivalence_margin" else yaml.safe_load  # YAML takes 1e-2 for a text
            keys[key] = read(text)
        except (yaml.YAMLError, ValueError):  # also for a number that Python does not read
            keys[key] = None
        if not allowed(keys[key]):
            raise UserError(f"{line}: {key} must be {meaning}")
    return keys


def _metrics(
    columns: Sequence[str] | None, runs: Sequence[Run], models: Sequence[MeasuredModel] = ()
) -> list[Metric] | None:
    """Return the metrics of these columns, or of those that the runs' own configs name; None: the usual ones."""
    finished = [run for run in runs if run.finished]
    chosen = named_by_runs(finished) if columns is None else columns
    return None if chosen is None else choose(chosen, [*finished, *models])


def _check_baseline(table: Table, runs: Sequence[Run]) -> None:
    """Raise `UserError` unless the baseline is an arm's balancing or name, or what the configs of the runs say."""
    known = [row.arm.name for row in table.rows] + [run.spec.choices["balancing"] for run in runs]
    if table.baseline is not None and table.baseline not in (*known, *(run.spec.config.baseline for run in runs)):
        nearest = get_close_matches(table.baseline, dict.fromkeys(known), 3, 0)
        raise UserError(f"baseline={table.baseline}: no arm is that; there is {', '.join(nearest)}")
