"""Check the tables of a study's pages: table.md against table.json, the marked tables of README.md against rows.csv.

A marked table says in a comment which numbers it shows:

    <!-- table
    rows: lbl | simbal
    columns: - | val/loss | val/loss less lbl | word val/loss
    -->

`rows` names the arm of each line, or fills the `{0}`, `{1}` of the columns. A column is `-` (text), a number of
rows.csv (mean, and standard deviation if it is shown), its difference `less` another arm (and the 95% interval), its
`range` over seeds, or the `word` of table.json. ` @ ARM` takes another arm than the line's. `study:` names the folder.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from results.tools.rows import read_rows, read_table
from simbal.report.arms import seed_spans
from simbal.report.statistics import paired_difference

NUMBER = re.compile(r"(?<![\w.])[<+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
MARKED = re.compile(r"<!-- table\n(.*?)-->\n(.*?)<!-- /table -->", re.S)
DIFFERENCE = {
    "difference": ("mean",), "95% interval": ("low", "high"), "detectable": ("detectable",), "p": ("p",),
    "p (Holm)": ("p_holm",), "d_z": ("effect",), "pairs": ("pairs",),
}  # fmt: skip
Line = dict[str, str]  # a table's line by heading


def agrees(printed: str, value: float) -> bool:
    """Whether a printed number is `value` rounded to as many digits; `<0.001` holds for any value below it."""
    text = printed.replace(",", "")
    if text.startswith("<"):
        return value < float(text[1:])
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(text) - value) <= unit / 2 * (1 + 1e-6)


def read_tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield each Markdown table as its caption (the line of text above), its headings and its lines."""
    caption, table = "", list[list[str]]()
    for line in [*text.replace("\\", "").splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
            continue
        if len(table) > 2:
            yield caption, table[0], table[2:]
        table, caption = [], line or caption


def check_numbers(cell: str, values: Sequence[float | None], where: str) -> list[str]:
    """Return a sentence unless the numbers of a cell are `values`, without those that are None."""
    printed, known = NUMBER.findall(cell), [value for value in values if value is not None]
    if len(printed) == len(known) and all(map(agrees, printed, known)):
        return []
    return [f"{where}: {cell!r} is printed, the rows give {', '.join(f'{value:.6g}' for value in known)}"]


def check_table(text: str, table: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Check table.md against table.json, whose arms have these names."""
    arms, wrong = dict(zip(names, table["arms"], strict=True)), list[str]()
    keys = {title: key for key, title in table["metrics"].items()}
    for caption, headings, cells in read_tables(text):
        lines = [dict(zip(headings, line, strict=True)) for line in cells]
        if "difference" in headings and "difference to" in caption:
            wrong += _check_differences(lines, arms, keys)
        elif "seeds" in headings and any(_title(heading) in keys for heading in headings):
            for line, (name, arm) in zip(lines, arms.items(), strict=True):
                wrong += _check_means(line, name, arm, keys)
        elif "saved" in headings:
            wrong += [sentence for line in lines for sentence in _check_tokens(line, arms[line["arm"]])]
    return wrong


def check_readme(text: str, results: Path, study: str) -> list[str]:
    """Check the marked tables of a README.md against the rows.csv and table.json of their studies."""
    wrong = [] if text.count("<!-- table\n") == len(MARKED.findall(text)) else ["a marked table has no end"]
    for marker, table in MARKED.findall(text):
        said = dict(line.split(": ", 1) for line in marker.splitlines())
        rows, columns = said["rows"].split(" | "), said["columns"].split(" | ")
        folder = results / said.get("study", study)
        ((_, _, cells),) = read_tables(table)
        if len(rows) != len(cells) or any(len(columns) != len(line) for line in cells):
            wrong.append(f"a marked table has {len(cells)} lines, its comment {len(rows)}, or other columns")
            continue
        numbers = Shown(folder)
        for row, line in zip(rows, cells, strict=True):
            for column, cell in zip(columns, line, strict=True):
                if column != "-" and cell and row != "-":
                    filled = column.format(*row.split(", "))
                    wrong += numbers.check(cell, filled, row, f"{row}, {filled}")
    return wrong


class Shown:
    """The numbers of a study that a marked table may show."""

    def __init__(self, folder: Path) -> None:
        self.arms = read_rows(folder)
        self.concluded = dict(zip(self.arms, read_table(folder)["arms"], strict=True))

    def check(self, cell: str, column: str, row: str, where: str) -> list[str]:
        """Return what is wrong with a cell."""
        column, _, name = column.partition(" @ ")
        name = name or row
        column, _, baseline = column.partition(" less ")
        if not {name, baseline or name} <= self.arms.keys():
            return [f"{where}: rows.csv has no such arm"]
        kind, _, key = column.rpartition(" ") if column.startswith(("word ", "range ")) else ("", "", column)
        if kind == "word":
            found = self.concluded[name]["differences"].get(key, {"conclusion": "no difference", "detectable": None})
            wrong = check_numbers(cell, [found["detectable"]][: len(NUMBER.findall(cell))], where)
            right = NUMBER.sub("", cell).strip(" *,") == found["conclusion"]
            return wrong if right else [*wrong, f"{where}: {cell!r} is printed, the rows give {found['conclusion']!r}"]
        values = [self.arms[name].values(part) for part in key.split(", ")]
        if kind == "range":
            return check_numbers(cell, [min(values[0].values()), max(values[0].values())], where)
        if baseline:
            pair = paired_difference(values[0], self.arms[baseline].values(key))
            shown = [pair.mean, pair.low, pair.high] if pair else []
        elif len(values) > 1:
            shown = [fmean(each.values()) for each in values]
        else:
            shown = [fmean(values[0].values()), stdev(values[0].values()) if len(values[0]) > 1 else None]
        return check_numbers(cell, shown[: max(1, len(NUMBER.findall(cell)))], where)


def _title(heading: str) -> str:
    return heading.rstrip(" ↑↓")


def _check_means(line: Line, name: str, arm: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    seeds = [run["seed"] for run in arm["runs"]]
    wrong = [] if line["seeds"] == seed_spans(seeds) else [f"{name}: seeds {line['seeds']}, not {seed_spans(seeds)}"]
    wrong += check_numbers(line["n"], [len(seeds)], f"{name} n")
    wrong += [] if line["balancing"] == arm["label"]["balancing"] else [f"{line['balancing']} stands for {name}"]
    for heading, cell in line.items():
        if key := keys.get(_title(heading)):
            found = arm["summaries"][key] or {"mean": None, "sd": None, "n": len(seeds)}
            some = found["n"] if found["n"] < len(seeds) else None
            wrong += check_numbers(cell, [found["mean"], found["sd"], some], f"{name} {key}")
    return wrong


def _check_differences(lines: Sequence[Line], arms: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    name, wrong = "", list[str]()
    left = {(arm, key) for arm, of in arms.items() for key in of["differences"]}
    for line in lines:
        name, key = line["arm"] or name, keys[_title(line["metric"])]
        left.discard((name, key))
        found = arms.get(name, {"differences": {}})["differences"].get(key)
        if found is None:
            wrong.append(f"{name} {key}: table.json has no such difference")
            continue
        over, welch = found["over_documents"] or {}, found["welch"] or {}
        if line.get("conclusion", found["conclusion"]) != found["conclusion"]:
            wrong.append(f"{name} {key}: {line['conclusion']} is printed, not {found['conclusion']}")
        for heading, cell in line.items():
            if heading in DIFFERENCE:
                values = [found[part] for part in DIFFERENCE[heading]]
            elif heading == "over documents":
                values = [over.get("low"), over.get("high")]
            elif heading == "Welch p":
                values = [welch.get("p")]
            else:
                continue
            wrong += check_numbers(cell, values, f"{name} {key} {heading}")
    return wrong + [f"table.md has no line for {name} {key}" for name, key in sorted(left)]


def _check_tokens(line: Line, arm: Mapping[str, Any]) -> list[str]:
    found = arm["tokens_to_loss"]
    count, missed = len(found["shares"]), [*found["shares"].values()].count(None)
    slope = found["by_slope"] or {"mean": None, "low": None, "high": None}
    by_slope = {key: None if slope[key] is None else -100 * math.expm1(-slope[key]) for key in ("mean", "low", "high")}
    saving, low, high = (None if found[key] is None else 100 * found[key] for key in ("saving", "low", "high"))
    expected = {
        "seeds": [count], "not reached": [missed, count] if missed else [],
        "tokens needed": [None if saving is None else 100 - saving], "saved": [saving], "95% interval": [low, high],
        "saved by slope": [by_slope["mean"]], "its interval": [by_slope["low"], by_slope["high"]],
    }  # fmt: skip
    shown = [(line[heading], expected[heading]) for heading in expected if heading in line]
    return [wrong for cell, values in shown for wrong in check_numbers(cell, values, f"{line['arm']} tokens")]
