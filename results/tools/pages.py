"""Render the marked tables of a study's pages from rows.csv: python -m results.tools.pages writes them.

The comment that opens a marked table has its headings, its columns and its lines:

    <!-- table
    | balancing | loss | less that of lbl |
    | {1} | {val/loss: mean.4f ± sd.4f} | {val/loss less lbl init=normal: mean+.3f (low+.3f to high+.3f)} |
    lbl init=normal; lbl
    simbal init=normal; simbal
    -->

`{0}`, `{1}` are the parts of a line, the first of them the arm. Any other field is `KEY: PATTERN`, where the pattern
names statistics over the runs of the arm, each with the format of Python. `KEY less ARM` is the paired difference to
another arm, `@ ARM` another arm than the line's (`A and B`: the runs of both), `in STUDY` another study, and `X by Y`
the quotient of two keys, less 1. A cell is empty where a statistic was not measured. A line that begins with `|` has
columns of its own. `<!-- table SOURCE` names another study than the page's, or a file that has these lines.
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

MARKED = re.compile(r"(<!-- table ?(\S*)\n(.*?)-->\n\n).*?(\n\n<!-- /table -->)", re.S)
ARGUMENT, FIELD = re.compile(r"{(\d+)}"), re.compile(r"{([^{}]+)}")
STATISTIC = re.compile(r"\b(mean|sd|low|high|least|most|effect|word|detectable)([-+,.\d]*[def%]|\b)")


def unlike(printed: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a sentence for each line of a printed table that is not what the rows give."""
    both = [pair for pair in zip_longest(printed, given) if pair[0] != pair[1]]
    return [f"{line!r} is printed, the rows give {other!r}" for line, other in both]


class Study:
    """The numbers of a study by arm."""

    def __init__(self, folder: Path) -> None:
        self.arms, self.table = read_rows(folder), read_table(folder)
        self.compared = cache(lambda baseline: recompute(self.arms, self.table | {"baseline": baseline}))

    def statistics(self, key: str, name: str, baseline: str) -> dict[str, Any]:
        """Return the statistics of a number over the runs of an arm, or of its paired difference to another arm."""
        values = self._values(key, name)
        if baseline:
            others = {} if name == baseline else self._values(key, baseline)
            values = {seed: values[seed] - others[seed] for seed in values if seed in others}
        numbers = np.array([*values.values()])
        if not numbers.size:
            return {}
        found = {"mean": numbers.mean(), "least": numbers.min(), "most": numbers.max()}
        several = numbers.size > 1 and np.isfinite(numbers).all()
        if several:
            found["sd"] = numbers.std(ddof=1)
        if several and baseline:
            found["low"], found["high"] = ttest_1samp(numbers, 0).confidence_interval()
            found["effect"] = found["mean"] / found["sd"]
        for corrected in (self.table["baseline"], baseline) if baseline else ():  # by Holm, over the table or over all
            row = self.compared(corrected)[name]
            if row.other and row.other.name == baseline and (one := row.differences.get(key)):
                return found | {"word": one.conclusion, "detectable": one.detectable}
        return found

    def _values(self, key: str, names: str) -> dict[tuple[int, int], float]:
        """Return a number by arm and seed."""
        key, _, divisor = key.partition(" by ")
        arms = [self.arms[name] for name in names.split(" and ") if name in self.arms]
        values = {(place, seed): value for place, arm in enumerate(arms) for seed, value in arm.values(key).items()}
        divisors = self._values(divisor, names) if divisor else {}
        return {seed: value / divisors[seed] - 1 for seed, value in values.items()} if divisor else values


class Pages:
    """The pages of a folder of studies, whose files are read once."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.study = cache(lambda name: Study(results / name))
        self.render = cache(self._render)

    def check(self, text: str, study: str) -> list[str]:
        """Return a sentence for each line of a page's tables that is not as the rows give it."""
        wrong = [] if text.count("<!-- table") == len(MARKED.findall(text)) else ["a marked table has no end"]
        others = (line for line in MARKED.sub("", text).splitlines() if re.match(r"\|.*\d", line))
        wrong += [f"{line!r} is not in a marked table" for line in others]
        return wrong + unlike(text.splitlines(), self.fill(text, study).splitlines())

    def fill(self, text: str, study: str) -> str:
        """Return a page with its marked tables rendered again."""
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
        """Return a cell, empty if one of its statistics is not known."""

        def filled(field: re.Match[str]) -> str:
            where, _, pattern = field[1].partition(": ")
            where, _, other_study = where.partition(" in ")
            where, _, name = where.partition(" @ ")
            key, _, baseline = where.partition(" less ")
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
    for page in sorted(results.glob("**/README.md")):
        page.write_text(pages.fill(page.read_text(encoding="utf-8"), page.parent.name), encoding="utf-8")
