"""Checks what results/ prints: rows against runs, tables against rows, texts, and when its plans were written."""

import csv
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from simbal.errors import UserError
from simbal.report.arms import group
from simbal.report.collect import collect
from simbal.report.comparison import compare
from simbal.report.reproduce.check_table import check_table
from simbal.report.reproduce.kept import RUNS, bring_back
from simbal.report.reproduce.plans import check_plan
from simbal.report.reproduce.printed import Checked
from simbal.report.reproduce.rows import ROWS, baseline_of, columns_of, rows_csv
from simbal.report.reproduce.texts import TEMPLATE, TEXT, check_text


def verify(results: Path) -> None:
    """Check each table.md, text and plan.md of `results` and its folders; print what is unverified.

    Raises:
        UserError: a number is wrong, a text is not as its template has it, a plan is too late, or a file is not there.
    """
    studies = sorted({file.parent for name in ("table.md", ROWS) for file in results.glob(f"*/{name}")})
    found = {f"{folder.name}/table.md": check_table(folder) for folder in studies}
    found |= {f"{folder.name}/{ROWS}": check_rows(folder) for folder in studies if (folder / RUNS).exists()}
    if not found:
        raise UserError(f"{results} holds no study")
    folders = {file.parent for name in (TEXT, TEMPLATE) for file in results.glob(f"**/{name}")}
    for folder in sorted(folders):
        found[str((folder / TEXT).relative_to(results))] = check_text(folder / TEXT, results)
    for name, checked in found.items():
        _print(name, checked)
    late = 0
    for plan in sorted(results.glob("*/plan.md")):
        said, wrong = check_plan(plan.parent)
        print(f"{plan.parent.name}/plan.md: {said}")
        late += wrong
    total = Checked()
    for checked in found.values():
        total.add(checked)
    print(f"verified: {total.verified:,} numbers")
    print(f"not verified: {len(total.unverified):,} numbers: of curves, single runs, the paper, and settings")
    if count := len(total.wrong):
        raise UserError(f"{count} numbers or sentences of {results} are not as its rows have them: see above")
    if late:
        raise UserError(f"{results} has {late} of its plans younger than their runs: see above")


def check_rows(folder: Path) -> Checked:
    """Make rows.csv of a study again from the records and curves of its runs, those that runs.tar.xz has.

    Raises:
        UserError: runs.tar.xz or table.json is broken.
    """
    with TemporaryDirectory() as place:
        bring_back(folder, Path(place))
        arms = group([run for run in collect(Path(place)) if run.finished], columns_of(folder))
        made = rows_csv(compare(arms, baseline_of(folder), [], False)).splitlines()
    checked = Checked(verified=sum(map(bool, chain.from_iterable(csv.reader(made[1:])))))
    if (folder / ROWS).read_text(encoding="utf-8").splitlines() != made:
        checked.wrong.append(f"{ROWS} is not what the runs in {RUNS} give: reproduce the study")
    return checked


def _print(name: str, checked: Checked) -> None:
    left = f", {len(checked.unverified)} not" if checked.unverified else ""
    print(f"{name}: {checked.verified} numbers verified{left}")
    if checked.unverified:
        print(f"    not verified: {' '.join(checked.unverified)}")
    for sentence in checked.wrong:
        print(f"    WRONG: {sentence}")
