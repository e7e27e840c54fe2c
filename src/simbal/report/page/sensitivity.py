"""The dependence of the perplexity at the end of training on a number of the config, such as a coefficient."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from simbal.report.arms import Arm, short_label
from simbal.report.page.series import PERPLEXITIES, Curve
from simbal.report.page.styles import MOST_ARMS, styles
from simbal.report.statistics import standard_deviation


def sensitivity(arms: Sequence[Arm], baseline: str | None) -> list[Curve]:
    """Return a line over each key in which arms of one balancing differ by a number, and the baseline's as level ones.

    Where they differ in several numbers, x is the one with the most values and the others tell the lines apart.

    Args:
        arms: of one table.
        baseline: what the table compares with.

    Returns:
        The lines, in the order of the arms; none if none has three points, or if they are more than can be told apart.
    """
    found: dict[str, dict[float | None, list[float]]] = defaultdict(lambda: defaultdict(list))
    tried = _tried(arms)
    for arm in arms:
        name, x = _place(arm, tried[arm.balancing])
        shown = x is not None or baseline in (arm.balancing, arm.name)
        if shown and (values := [*arm.values("val/ppl").values()]):
            found[name][x] += values
    places = sorted({x for points in found.values() for x in points if x is not None})
    if len(found) > MOST_ARMS or all(len(points) < 3 for points in found.values()):
        return []
    return [
        _line(name, style, points, places)
        for style, (name, points) in zip(styles([*found]), found.items(), strict=True)
    ]


def _tried(arms: Sequence[Arm]) -> dict[str, dict[str, int]]:
    """Return how many values the arms of a balancing have, by label column."""
    texts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for arm in arms:
        for column, cell in arm.label.items():
            texts[arm.balancing][column].add(cell.text)
    return {balancing: {column: len(each) for column, each in of.items()} for balancing, of in texts.items()}


def _place(arm: Arm, tried: Mapping[str, int]) -> tuple[str, float | None]:
    """Return the name of an arm's line, and the arm's x on it; None: all along it."""
    numbers = {column: cell.value for column, cell in arm.label.items() if cell.value is not None and tried[column] > 1}
    if not numbers:
        return arm.name, None
    key = max(numbers, key=tried.__getitem__)
    others = {column: cell for column, cell in arm.label.items() if column != key}
    return f"{short_label(others)} over {key.removeprefix(f'balancing.{arm.balancing}.')}", numbers[key]


def _line(name: str, style: int, points: dict[float | None, list[float]], places: Sequence[float]) -> Curve:
    if None in points:
        points = dict.fromkeys(places, points[None])
    by_x = sorted((x, values) for x, values in points.items() if x is not None)
    sds = [standard_deviation(values) for _, values in by_x] if all(len(values) > 1 for _, values in by_x) else None
    return Curve(name, style, [x for x, _ in by_x], [fmean(values) for _, values in by_x], sds, limits=PERPLEXITIES)
