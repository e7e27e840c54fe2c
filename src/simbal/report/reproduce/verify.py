"""Checks what results/ prints: every number of its tables, and those of its texts that quoted.yaml has formulas for.

In quoted.yaml a sentence stands as in the text, with a formula in braces in the place of each number. `{mean_sd(...)}`
is short for `{mean(...)} ± {sd(...)}`, and `{interval(...)}` for `{low(...)} to {high(...)}`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from simbal.errors import UserError
from simbal.files.disk import read_bytes
from simbal.report.reproduce.check_table import LARGEST, check_table
from simbal.report.reproduce.formulas import Study
from simbal.report.reproduce.plans import check_plan
from simbal.report.reproduce.printed import NUMBER, Checked

QUOTED = "quoted.yaml"
FORMULA = re.compile(r"\{([^{}]*)\}")
SHORT = {"mean_sd": r"{mean\1} ± {sd\1}", "interval": r"{low\1} to {high\1}"}
NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)")  # code and targets of links


def verify(results: Path) -> None:
    """Check each table.md and plan.md below `results`, and texts that its quoted.yaml names; print what is unverified.

    Raises:
        UserError: a number is wrong, a sentence is not in its text, a plan is too late, or a file is not there.
    """
    quoted = _quoted(results)
    found = {f"{file.parent.name}/table.md": check_table(file.parent) for file in sorted(results.glob("*/table.md"))}
    if not found:
        raise UserError(f"{results} holds no study")
    for name in sorted({*quoted, *(f"{file.parent.name}/README.md" for file in results.glob("*/README.md"))}):
        found[name] = check_text(results, name, quoted.get(name, {}))
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
    by_means, left = total.of_means, len(total.unverified)
    print(f"verified: {total.verified:,} numbers, {by_means:,} of them by the means in analyses.csv, else by rows.csv")
    print(f"not verified: {left:,} numbers: of curves, single analyses and runs, the paper, and settings")
    if count := len(total.wrong):
        raise UserError(f"{count} numbers or sentences of {results} are not as its rows have them: see above")
    if late:
        raise UserError(f"{results} has {late} of its plans younger than their runs: see above")


def check_text(results: Path, name: str, sentences: Mapping[str, list[str]]) -> Checked:
    """Check a text of people.

    Args:
        results: the folder of the studies.
        name: of the file, from there.
        sentences: by the study whose rows they are held against.

    Raises:
        UserError: there is no such file, or a formula is none.
    """
    try:
        text = (results / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UserError(f"{results / name} cannot be read, and {QUOTED} names it") from None
    checked, spans = Checked(), list[tuple[int, int]]()
    for study, quotes in sentences.items():
        rows = Study(results / study)
        for quote in quotes:
            spans += _check_sentence(text, quote, rows, checked)
    blank = NO_PROSE.sub(lambda match: " " * len(match[0]), text)
    for number in NUMBER.finditer(blank):
        if not any(start <= number.start() < end for start, end in spans):
            checked.unverified.append(number[0])
    return checked


def _check_sentence(text: str, quote: str, rows: Study, checked: Checked) -> list[tuple[int, int]]:
    """Check the one place where a sentence stands; return the spans of its numbers."""
    for name, long in SHORT.items():
        quote = re.sub(rf"{{{name}(\([^{{}}]*\))}}", long, quote)
    *parts, last = FORMULA.split(quote)  # texts and formulas in turn
    pattern = "".join(_pattern(part) if place % 2 == 0 else f"({NUMBER.pattern})" for place, part in enumerate(parts))
    places = [*re.finditer(pattern + _pattern(last), text)]
    if len(places) != 1:
        checked.wrong.append(f"{QUOTED} has a sentence that stands {len(places)} times in the text: {quote}")
        return []
    (place,) = places
    for group, formula in enumerate(parts[1::2], 1):
        try:
            rows.from_means = False
            value = rows.number(formula)
            checked.of_means += rows.from_means
        except ValueError as error:
            raise UserError(f"{QUOTED}: {error}") from None
        checked.hold(place[group], value, formula)
    return [place.span(group) for group in range(1, len(parts) // 2 + 1)]


def _pattern(text: str) -> str:
    """Return a pattern for a text whose lines may be broken elsewhere."""
    words = [re.escape(word) for word in re.split(r"\s+", text)]
    return r"\s+".join(words)


def _quoted(results: Path) -> dict[str, dict[str, list[str]]]:
    """Return the sentences of quoted.yaml, by file and study."""
    file = results / QUOTED
    try:
        content: Any = yaml.safe_load(read_bytes(file, LARGEST)) if file.exists() else {}
        if all(isinstance(quote, str) for of in content.values() for quotes in of.values() for quote in quotes):
            return dict(content)
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        pass
    raise UserError(f"{file} must list sentences by file and study")


def _print(name: str, checked: Checked) -> None:
    left = f", {len(checked.unverified)} not" if checked.unverified else ""
    print(f"{name}: {checked.verified} numbers verified{left}")
    if checked.unverified:
        print(f"    not verified: {' '.join(checked.unverified)}")
    for sentence in checked.wrong:
        print(f"    WRONG: {sentence}")
