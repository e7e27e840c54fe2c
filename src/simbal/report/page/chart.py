"""The curves of a figure, and the JSON from which a script draws them in a browser, thinned to what a screen shows."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simbal.report.page.series import Curve
from simbal.report.page.styles import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS, FEWEST_POINTS = 240, 16  # of a line; a figure is some 500 pixels wide


@dataclass(frozen=True)
class Chart:
    """Curves on one pair of axes, or as many panels on the same scales, each with its title."""

    panels: Sequence[tuple[str, Sequence[Curve]]]  # a single one has no title
    x_label: str
    y_label: str
    log: bool = False  # a logarithmic y where values differ much
    zero: bool = False  # a line at y = 0

    def figure(self) -> "Figure":
        """Draw it."""
        from simbal.report.page import figures

        (title, lines), *others = self.panels
        if title or others:
            return figures.panels(self.panels, self.x_label, self.y_label)
        return figures.curves(lines, self.x_label, self.y_label, self.log, zero=self.zero)


def thinned(charts: Sequence[tuple[str, Chart]], most_numbers: int) -> list[tuple[str, Chart]]:
    """Return charts whose lines have so few points that all their numbers together are about `most_numbers`.

    A line keeps its first and last point, and those between at even distances.
    """
    columns = sum(_columns(curve) for _, chart in charts for curve in _curves(chart))
    most = max(FEWEST_POINTS, min(MOST_POINTS, most_numbers // max(1, columns)))
    return [
        (
            name,
            replace(chart, panels=[(title, [_thin(curve, most) for curve in lines]) for title, lines in chart.panels]),
        )
        for name, chart in charts
    ]


def _thin(curve: Curve, most: int) -> Curve:
    kept = spread(len(curve.xs), most)
    return replace(
        curve,
        xs=[curve.xs[place] for place in kept],
        means=[curve.means[place] for place in kept],
        bands=curve.bands and [curve.bands[place] for place in kept],
    )


def curves_json(charts: Sequence[tuple[str, Chart]]) -> str:
    """Return charts, each with its name, as JSON that can stand in a script element: it holds no angle bracket."""
    text = json.dumps([_chart(name, chart) for name, chart in charts], separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _curves(chart: Chart) -> Iterable[Curve]:
    return (curve for _, curves in chart.panels for curve in curves)


def _columns(curve: Curve) -> int:
    return 1 + 2 * (curve.bands is not None)


def _chart(name: str, chart: Chart) -> dict[str, Any]:
    return {
        "name": name,
        "x": chart.x_label,
        "y": chart.y_label,
        "logY": chart.log and spans([mean for curve in _curves(chart) for mean in curve.means]),
        "panels": [_panel(title, curves) for title, curves in chart.panels],
    }


def _panel(title: str, curves: Sequence[Curve]) -> dict[str, Any]:
    """Return a panel; what has the same xs as the first curve has none of its own."""
    made = [*map(_curve, curves)]
    xs = made[0]["x"] if made else []
    for curve in made:
        if curve["x"] == xs:
            del curve["x"]
    return {"title": title, "x": xs, "curves": made}


def _curve(curve: Curve) -> dict[str, Any]:
    ends = curve.band_ends if curve.bands else None
    return {
        "arm": curve.name,
        "color": curve.style % len(COLORS),
        "dashed": curve.style >= len(COLORS),
        "x": _rounded(curve.xs, 8),
        "y": _rounded(curve.means),
        "low": ends and _rounded([low for low, _ in ends]),
        "high": ends and _rounded([high for _, high in ends]),
    }


def _rounded(values: Sequence[float], digits: int = 5) -> list[float]:
    """Return the values with so many significant digits; whole ones without a point."""
    rounded = [float(f"{value:.{digits}g}") for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def spans(values: Sequence[float]) -> bool:
    """Whether values differ so much that a logarithmic scale shows them better."""
    return min(values) > 0 and max(values) > 4 * min(values)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the first `count` whole numbers, the first and the last among them."""
    if count <= most:
        return [*range(count)]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
