"""Report on a folder of runs: read them, write the tables and the page, and print the table.

report.py calls `report`, and so does a sweep when it ends.
"""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simbal.config.messages import describe_validation_error
from simbal.console import console
from simbal.errors import UserError
from simbal.report import compare, sections
from simbal.report.collect import Run, collect, last_sweep, measured_models
from simbal.report.columns import choose_columns
from simbal.report.render import print_section, show, write_tables
from simbal.report.table import Table, build
from simbal.runs.folder import runs_in


class ReportKeys(BaseModel):
    """The keys of report.py."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    baseline: str | None = None  # balancing or arm to compare with; None: from the runs' config
    columns: list[str] | None = None  # metric names; None: from the runs' config, or the default columns
    paper: bool = False  # show the paper's numbers next to ours
    equivalence_margin: float | None = Field(None, gt=0)  # nats per token; None: from the runs' config
    compare: Literal["all"] | None = None  # compare every pair of arms
    power: bool = False  # also print how many more seeds would decide each comparison (only printed)
    figures: bool = False  # also write the page's figures as SVG and PDF
    explain: bool = False  # print all columns, notes and definitions; the files always have them
    save: bool = False  # write the files although other keys change the table

    @property
    def writes(self) -> bool:
        """Whether the table is written to the files: keys that change it are only printed."""
        changing = {"baseline", "columns", "equivalence_margin", "compare", "paper"}
        return self.save or not self.model_dump(exclude_defaults=True).keys() & changing


def report(folder: Path, **keys: Any) -> None:
    """Print the table of the runs and models in `folder`, and write table.md, .tex, .csv, .json and index.html there.

    Keys that change the table are only printed, unless save=true.

    Args:
        folder: outputs/<name>.
        keys: see `ReportKeys`.

    Raises:
        UserError: the runs cannot be read or compared, or a column or the baseline is unknown.
    """
    options = ReportKeys(**keys)
    table = read_table(folder, **keys)
    if options.writes:
        from simbal.report import page  # importing altair takes a third of a second

        write_tables(table, folder)
        page.write(table, folder)
    if options.figures:
        from simbal.report.figures import cards, write_figures

        write_figures(cards(table, folder), folder)
    out = console()
    show(table, out, options.explain, options.writes)
    if options.power:
        print_section(sections.power(table), out)
    written = ["table.md", "table.tex", "table.csv", "table.json", "index.html"] if options.writes else []
    written += ["figures/"] if options.figures else []
    out.print(f"{folder}: {', '.join(written) or 'nothing'} written", soft_wrap=True)
    if not options.writes:
        out.print("save=true writes this table to the files")


def read_table(folder: Path, **keys: Any) -> Table:
    """Return the table of the runs and models in `folder`; for keys and errors see `report`."""
    options = ReportKeys(**keys)
    models = measured_models(folder)
    runs = collect(folder) if runs_in(folder) or not models else []
    started = {run.path.name for run in runs}
    missing = {name: label for name, label in last_sweep(folder)[1].items() if name not in started}
    measured = [*(run for run in runs if run.finished), *models]
    chosen = None if options.columns is None else choose_columns(options.columns, measured)
    margin, pairs, name = options.equivalence_margin, options.compare == "all", folder.resolve().name
    table = build(name, runs, options.baseline, chosen, options.paper, margin, pairs, models)
    _require_baseline(table, runs)
    return replace(table, missing=missing)


def report_both(first: Path, second: Path, **keys: Any) -> None:
    """Print the settings that differ between two sweeps or runs, and a table of both; write no files.

    Raises:
        UserError: see `report`; or the runs cannot be compared (raised after the differing settings are printed).
    """
    options = ReportKeys(**keys)
    if options.figures:
        raise UserError("figures=true needs a single folder")
    sides = compare.read_sides(first, second)
    out = console()
    print_section(compare.differing_settings(*sides), out)
    if reason := compare.why_incomparable(*sides):
        raise UserError(reason)
    finished = [run for side in sides for run in side.finished]
    chosen = None if options.columns is None else choose_columns(options.columns, finished)
    margin, pairs = options.equivalence_margin, options.compare == "all"
    table = compare.build_both(*sides, options.baseline, chosen, options.paper, margin, pairs)
    _require_baseline(table, [run for side in sides for run in side.runs])
    show(table, out, options.explain, in_files=False)
    if options.power:
        print_section(sections.power(table), out)


def parse_keys(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` arguments into keyword arguments of `report`; `UserError` for a wrong key or value."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"{argument} is neither a folder nor key=value; keys: {', '.join(ReportKeys.model_fields)}")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{argument}: the value is not valid YAML") from None
    try:
        return dict(ReportKeys(**values))
    except ValidationError as error:
        raise UserError(describe_validation_error(error, candidates=ReportKeys.model_fields)) from None


def _require_baseline(table: Table, runs: Sequence[Run]) -> None:
    """Raise `UserError` unless the baseline is the balancing or name of an arm, or set in a run's config."""
    known = [row.arm.name for row in table.rows] + [run.spec.choices["balancing"] for run in runs]
    if table.baseline is not None and table.baseline not in (*known, *(run.spec.config.baseline for run in runs)):
        closest = get_close_matches(table.baseline, dict.fromkeys(known), 3, 0)
        raise UserError(f"baseline={table.baseline} is not an arm; did you mean {' or '.join(closest)}?")
