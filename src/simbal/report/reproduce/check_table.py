"""Checks the numbers and the words of a study's table.md against its rows.csv."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from simbal.errors import UserError
from simbal.metrics.table import NUMBERS
from simbal.report.arms import seed_spans
from simbal.report.columns import ABSENT
from simbal.report.conclusion import UNRESOLVED
from simbal.report.reproduce.formulas import ALPHA, SAME, Paired
from simbal.report.reproduce.printed import Checked, numbers
from simbal.report.reproduce.rows import SHARE, ArmRows, of_a_study, read_rows, rival
from simbal.report.statistics import holm, summarize

BASELINE = re.compile(r"difference to (.+) on the seeds")
OF_SHARES = ("tokens needed", "saved", "95% interval", "seeds", "not reached")  # headings of what rows.csv decides
DIRECTIONS = {"↓": ("better", "worse"), "↑": ("worse", "better")}  # of a smaller and of a larger number
WITHIN_MARGIN = {metric.key for metric in NUMBERS if metric.margin}
Line = dict[str, str]  # a line of a table, by heading


def check_table(folder: Path) -> Checked:
    """Check every number of table.md; those that are of curves, or of no run, are unverified.

    Raises:
        UserError: rows.csv, table.json or table.md is not there or broken.
    """
    arms, checked = read_rows(folder), Checked()
    if arms is None:
        raise UserError(f"there is no {folder / 'rows.csv'}: reproduce the study")
    with of_a_study(folder):
        table = json.loads((folder / "table.json").read_bytes())
        keys = {title: key for key, title in table["metrics"].items()}
        margin = table["equivalence_margin"]
        text = (folder / "table.md").read_text(encoding="utf-8")
    for caption, lines in tables(text):
        baseline = BASELINE.search(caption)
        if baseline and "difference" in lines[0]:
            _differences(lines, arms, keys, baseline[1], margin, checked)
        elif "seeds" in lines[0] and not keys.keys().isdisjoint(map(_title, lines[0])):
            _means(lines, arms, keys, checked)
        elif "tokens needed" in lines[0]:
            _tokens_to_loss(lines, arms, checked)
        else:
            cells = [cell for line in lines for heading, cell in line.items() if heading != "arm"]
            checked.unverified += [number for cell in cells for number in numbers(cell)]
    return checked


def tables(text: str) -> Iterator[tuple[str, list[Line]]]:
    """Yield each table of a Markdown text, after the line of text above it."""
    caption, table = "", list[list[str]]()
    for line in [*text.replace("\\", "").splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
            continue
        if len(table) > 2:
            yield caption, [dict(zip(table[0], cells, strict=False)) for cells in table[2:]]
        table = []
        caption = line or caption


def _title(heading: str) -> str:
    return heading.rstrip(" ↑↓")


def _means(lines: Sequence[Line], arms: Sequence[ArmRows], keys: dict[str, str], checked: Checked) -> None:
    if len(lines) != len(arms):
        checked.wrong.append(f"table.md has {len(lines)} arms and rows.csv {len(arms)}")
        return
    for line, arm in zip(lines, arms, strict=True):
        if line["balancing"] != arm.balancing:
            checked.wrong.append(f"table.md has {line['balancing']} where rows.csv has {arm.name}")
        if line["seeds"] != seed_spans([*arm.by_seed]):
            checked.wrong.append(f"{arm.name}: seeds {line['seeds']} are printed, not {seed_spans([*arm.by_seed])}")
        checked.hold(line["n"], len(arm.by_seed), f"{arm.name} n")
        for heading, cell in line.items():
            if key := keys.get(_title(heading)):
                _mean(cell, arm, key, checked)


def _mean(cell: str, arm: ArmRows, key: str, checked: Checked) -> None:
    values, where = [*arm.values(key).values()], f"{arm.name} {key}"
    summary, some_lack_it = summarize(values), len(values) < len(arm.by_seed)
    printed = [summary.mean, summary.sd, summary.n if some_lack_it else None] if summary else []
    _hold(numbers(cell), [value for value in printed if value is not None], where, checked)


def _differences(
    lines: Sequence[Line],
    arms: Sequence[ArmRows],
    keys: dict[str, str],
    baseline: str,
    margin: float | None,
    checked: Checked,
) -> None:
    by_name, found = {arm.name: arm for arm in arms}, list[tuple[Line, str, Paired]]()
    lacking = _all_differences(arms, {keys.get(_title(line["metric"]), "") for line in lines}, baseline)
    name = ""
    for line in lines:
        name, key = line["arm"] or name, keys.get(_title(line["metric"]))
        arm = by_name.get(name)
        other = arm and rival(arm, arms, baseline)
        if arm is None or other is None or key is None:
            checked.wrong.append(f"{name} {line['metric']}: rows.csv has no such arm, number or baseline {baseline}")
            continue
        lacking.pop((name, key), None)
        ratio = "%" in line["difference"]
        found.append((line, key, Paired(arm.values(key), other.values(key), ratio)))
        _difference(line, f"{name} {key}", found[-1][2], checked)
    checked.wrong += [f"table.md has no line for {name} {key}" for name, key in lacking]
    for key in dict.fromkeys(key for _, key, _ in found):
        of_key = [(line, paired) for line, of, paired in found if of == key]
        _tests(of_key, key, margin if key in WITHIN_MARGIN else None, checked)


def _all_differences(arms: Sequence[ArmRows], keys: Collection[str], baseline: str) -> dict[tuple[str, str], None]:
    """Return the arms and numbers that a table with these numbers has to compare with the baseline."""
    rivals = {arm.name: (arm, other) for arm in arms if (other := rival(arm, arms, baseline))}
    return {
        (name, key): None
        for name, (arm, other) in rivals.items()
        for key in sorted(keys)
        if arm.values(key).keys() & other.values(key)
    }


def _tests(lines: Sequence[tuple[Line, Paired]], key: str, margin: float | None, checked: Checked) -> None:
    """Check the corrected p and the words of all comparisons by one number."""
    tested = [(line, paired) for line, paired in lines if len(paired.differences) > 1]
    different = holm([paired.p for _, paired in tested])
    same = [1.0] * len(tested) if margin is None else holm([paired.equivalence_p(margin) for _, paired in tested])
    words: dict[int, str] = {id(line): UNRESOLVED for line, _ in lines}
    for (line, paired), p, p_same in zip(tested, different, same, strict=True):
        if (printed := line.get("p (Holm)", ABSENT)) != ABSENT:
            checked.hold(printed, p, f"{key} p (Holm)")
        if p < ALPHA:
            words[id(line)] = DIRECTIONS.get(line["metric"][-1], ("lower", "higher"))[paired.mean > 0]
        elif p_same < ALPHA:
            words[id(line)] = "equivalent"
    for line, _ in lines:
        if line.get("conclusion", words[id(line)]) != words[id(line)]:
            checked.wrong.append(f"{key}: {line['conclusion']} is printed, and the rows give {words[id(line)]}")


def _tokens_to_loss(lines: Sequence[Line], arms: Sequence[ArmRows], checked: Checked) -> None:
    by_name = {arm.name: [*arm.values(SHARE).values()] for arm in arms}
    for line in lines:
        shares = by_name.get(line["arm"], [])
        missed = sum(map(math.isinf, shares))
        computed: dict[str, Sequence[float]] = {"seeds": [len(shares)]}
        if missed:
            computed["not reached"] = [missed, len(shares)]
        elif shares:
            saved = Paired(dict.fromkeys(range(len(shares)), 100.0), {i: 100 * share for i, share in enumerate(shares)})
            computed |= {"tokens needed": [100 - saved.mean], "saved": [saved.mean]}
            computed |= {"95% interval": saved.interval} if max(shares) - min(shares) > SAME else {}
        for heading, cell in line.items():
            if heading in OF_SHARES:
                _hold(numbers(cell), computed.get(heading, []), f"{line['arm']} {heading}", checked)
            elif heading != "arm":
                checked.unverified += numbers(cell)


def _hold(printed: Sequence[str], values: Sequence[float], where: str, checked: Checked) -> None:
    if len(printed) != len(values):
        checked.wrong.append(f"{where}: {len(printed)} numbers are printed, and the rows give {len(values)}")
        return
    for text, value in zip(printed, values, strict=True):
        checked.hold(text, value, where)


def _difference(line: Line, where: str, paired: Paired, checked: Checked) -> None:
    computed: dict[str, Callable[[], Sequence[float]]] = {
        "difference": lambda: [paired.mean],
        "95% interval": lambda: paired.interval,
        "p": lambda: [paired.p],
        "detectable": lambda: [paired.detectable],
        "d_z": lambda: [paired.effect],
        "Welch p": lambda: [paired.welch_p],
        "pairs": lambda: [len(paired.differences)],
    }
    for heading, cell in line.items():
        printed = numbers(cell)
        if heading in ("arm", "metric", "p (Holm)") or not printed:
            continue
        if heading not in computed:
            checked.unverified += printed
            continue
        _hold(printed, computed[heading](), f"{where} {heading}", checked)
