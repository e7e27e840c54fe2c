"""Render the marked tables of the study pages from rows.csv: python -m results.tools.pages

The comment before a marked table has its headings, a template of a row, and one line per row:

    <!-- table
    | balancing | loss | Δ vs. lbl |
    | {1} | {val/loss: mean.4f ± sd.4f} | {val/loss vs lbl init=normal: mean+.3f [low+.3f, high+.3f]} |
    lbl init=normal; lbl
    simbal init=normal; simbal
    -->

`{0}`, `{1}` are the parts of a line; the first part is the arm. Other fields are `KEY: PATTERN`: the pattern names
statistics over the arm's runs, each followed by a Python format. `KEY vs ARM` is the paired difference from another
arm, `@ ARM` selects another arm (`A and B`: the runs of both), `in STUDY` another study, and `X by Y` is the ratio of
two keys minus 1. A cell is empty if a statistic was not measured. A line that starts with `|` is its own template.
`<!-- table SOURCE` names another study, or a file with these lines.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from results.tools.rows import read_rows, read_table, recompute

BODY = r"(?:(?!<!-- ).)*?"  # up to the next marker
MARKED = re.compile(rf"(<!-- table ?(\S*)\n({BODY})-->\n\n){BODY}(\n\n<!-- /table -->)", re.S)
ARGUMENT, FIELD = re.compile(r"{(\d+)}"), re.compile(r"{([^{}]+)}")
NOT_PAGES = {"plan.md", "table.md", "analyses.md", "claims.md", "others.md"}
STATISTIC = re.compile(r"\b(mean|sd|low|high|min|max|effect|conclusion|detectable)([-+,.\d]*[def%]|\b)")


def find_pages(results: Path) -> list[Path]:
    """Return the pages of all studies."""
    return [page for page in sorted(results.glob("**/*.md")) if page.name not in NOT_PAGES]


def compare_lines(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Return a message for each line that differs."""
    pairs = [pair for pair in zip_longest(found, expected) if pair[0] != pair[1]]
    return [f"found {line!r}, but rows.csv gives {other!r}" for line, other in pairs]


class Study:
    """Statistics of a study by arm."""

    def __init__(self, path: Path) -> None:
        self.arms, self.table = read_rows(path), read_table(path)
        self.compared = cache(lambda baseline: recompute(self.arms, self.table | {"baseline": baseline}))

    def statistics(self, key: str, name: str, baseline: str) -> dict[str, Any]:
        """Return statistics of a metric over an arm's runs, or of its paired difference from `baseline`."""
        values = self._values(key, name)
        if baseline:
            others = {} if name == baseline else self._values(key, baseline)
            values = {seed: values[seed] - others[seed] for seed in values if seed in others}
        numbers = np.array([*values.values()])
        if not numbers.size:
            return {}
        found = {"mean": numbers.mean(), "min": numbers.min(), "max": numbers.max()}
        has_spread = numbers.size > 1 and np.isfinite(numbers).all()
        if has_spread:
            found["sd"] = numbers.std(ddof=1)
        if has_spread and baseline:
            found["low"], found["high"] = ttest_1samp(numbers, 0).confidence_interval()
            found["effect"] = found["mean"] / found["sd"]
        for compared in (self.table["baseline"], baseline) if baseline else ():  # intervals as in the table
            row = self.compared(compared).get(name)
            one = row.differences.get(key) if row and row.other and row.other.name == baseline else None
            if one and one.low is not None:
                ends = {"low": one.low, "high": one.high, "detectable": one.detectable}
                return found | {"mean": one.mean, "conclusion": one.conclusion} | ends
        return found

    def _values(self, key: str, names: str) -> dict[tuple[int, int], float]:
        """Return values by arm and seed."""
        key, _, divisor = key.partition(" by ")
        arms = [self.arms[name] for name in names.split(" and ") if name in self.arms]
        values = {(place, seed): value for place, arm in enumerate(arms) for seed, value in arm.values(key).items()}
        divisors = self._values(divisor, names) if divisor else {}
        return {seed: value / divisors[seed] - 1 for seed, value in values.items()} if divisor else values


class Pages:
    """The pages of all studies. Each file is read once."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.study = cache(lambda name: Study(results / name))
        self.render = cache(self._render)

    def check(self, text: str, study: str) -> list[str]:
        """Return a message for each table line of a page that does not follow from rows.csv."""
        errors = [] if text.count("<!-- table") == len(MARKED.findall(text)) else ["a marked table has no end marker"]
        others = (line for line in MARKED.sub("", text).splitlines() if re.match(r"\|.*\d", line))
        errors += [f"{line!r} is not in a marked table" for line in others]
        return errors + compare_lines(text.splitlines(), self.fill(text, study).splitlines())

    def fill(self, text: str, study: str) -> str:
        """Return a page with its marked tables rendered."""
        return MARKED.sub(lambda found: found[1] + self.render(found[2], found[3], study) + found[4], text)

    def _render(self, source: str, marker: str, study: str) -> str:
        """Return the text of a marked table."""
        if source.endswith(".md"):
            marker, source = (self.results / source).read_text(encoding="utf-8"), ""
        heading, columns, *rows = marker.splitlines()
        lines = [heading, re.sub("[^|]+", "---", heading)]
        for row in rows:
            parts = [""] if row.startswith("|") else [part.strip() for part in row.split(";")]
            template = row if row.startswith("|") else columns
            filled = ARGUMENT.sub(lambda found, parts=parts: [*parts, *[""] * 9][int(found[1])], template)
            cells = [self._cell(cell, parts[0], source or study) for cell in filled[1:-1].split("|")]
            lines.append(f"|{'|'.join(cells)}|")
        return "\n".join(lines)

    def _cell(self, template: str, arm: str, study: str) -> str:
        """Return a cell; empty if one of its statistics was not measured."""

        def filled(field: re.Match[str]) -> str:
            where, _, pattern = field[1].partition(": ")
            where, _, other_study = where.partition(" in ")
            where, _, name = where.partition(" @ ")
            key, _, baseline = where.partition(" vs ")
            found = self.study(other_study or study).statistics(key, (name or arm).strip(), baseline.strip())
            text = STATISTIC.sub(lambda part: format(found[part[1]], part[2]), pattern)
            return re.sub(r"e([+-])0", r"e\1", text)

        try:
            return re.sub(" +$", " ", FIELD.sub(filled, template))
        except KeyError:
            return " "


if __name__ == "__main__":
    results = Path(__file__).parents[1]
    pages = Pages(results)
    for page in find_pages(results):
        page.write_text(pages.fill(page.read_text(encoding="utf-8"), page.parent.name), encoding="utf-8")
