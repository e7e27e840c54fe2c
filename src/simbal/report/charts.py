"""Figures as Altair charts: curves, differences with intervals, and loads; for the page, SVG and PDF.

Colors are CSS variables such as `var(--ink)`: the page defines them for light and dark, `standalone` replaces them.
A chart reads the dataset `rows`, which is stored compactly: one entry per line, with scalar names and lists of numbers.
`expand` and page.js turn the entries into rows.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from textwrap import wrap
from typing import Any

import altair as alt
import vl_convert

from simbal.report.curves import NUM_COLORS, Curve

Columns = dict[str, Any]  # an entry of a dataset: lists of equal length, and scalars that apply to every element

# Okabe and Ito, "Color Universal Design", and four more: CIE 1976 distances of at least 14 to each other, also for
# protanopes, deuteranopes and tritanopes (Machado, Oliveira and Fernandes 2009)
COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#b8548c", "#8f6bff", "#6b3f1d", "#1f1f1f", "#332288", "#882255", "#7a2fb8",
)  # fmt: skip
SHAPES = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right",
    "M0.5,-0.87L1,0L0.5,0.87L-0.5,0.87L-1,0L-0.5,-0.87Z", "M0,-1L0.59,0.81L-0.95,-0.31L0.95,-0.31L-0.59,0.81Z",
)  # fmt: skip
CONCLUSIONS = {
    "better": "#00795a", "worse": "#c2410c", "equivalent": "#0b5cad", "identical": "#0b5cad", "higher": "#7c5ab8",
    "lower": "#7c5ab8", "not resolved": "#737b84",
}  # fmt: skip
PAPER_COLORS = {"ink": "#1f2328", "muted": "#4b535c", "line": "#d0d7de", "card": "white"}
PAPER_COLORS |= {word.replace(" ", "-"): color for word, color in CONCLUSIONS.items()}
PAPER_COLORS |= {f"arm{place}": color for place, color in enumerate(COLORS)}
# by style: the second half has dashed lines, and no color has the same shape twice
STYLE_SHAPES = [*SHAPES, *SHAPES[5:], *SHAPES[:5]]
STYLE_COLORS = [f"var(--arm{place})" for place in range(NUM_COLORS)] * 2
STYLE_DASHES = [*[[1, 0]] * NUM_COLORS, *[[5, 3]] * NUM_COLORS]
SHORT = "datum.value ? format(datum.value, '~s') : '0'"  # 20k, 1.5M
VERSION = "6.4"  # of Vega-Lite; the newest in vl-convert 1.9
PAPER_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # vl-convert includes Liberation Sans
MOST_POINTS = 240  # of a line; a chart is about 500 pixels wide
MOST_MARKS = 15  # of a line
NARROW = 300  # px; narrower charts show short numbers next to an interval
LONGEST_LINE, LONGEST_TITLE, LONGEST_NAME = 22, 18, 34  # characters next to an interval, above a panel, and in a legend

alt.data_transformers.disable_max_rows()


@dataclass(frozen=True)
class Medium:
    """The medium of a chart, with width and font size in px."""

    interactive: bool  # with tooltips and parameters, but without a legend, which the page has
    width: int
    letters: float

    @property
    def letters_per_line(self) -> int:
        """The number of characters that fit on a line."""
        return int(self.width / self.letters / 0.53)


SCREEN = Medium(True, 450, 11)
PAPER_COLUMN = Medium(False, 238, 7)  # 3.3 inches; in a PDF a px is a point
DOCUMENT = Medium(False, 440, 10)


@dataclass(frozen=True)
class Lines:
    """Curves in one panel, or in several panels with the same scales."""

    panels: Sequence[tuple[str, Sequence[Curve]]]  # title and curves; a single panel has the title ""
    x_label: str
    y_label: str
    log: bool = False  # logarithmic y axis, if the values suit it
    log_x: bool = False
    zero: bool = False  # draw a line at y = 0
    levels: Mapping[str, float] = field(default_factory=dict)  # horizontal reference lines by label
    most_points: int = MOST_POINTS  # per line: the first, the last, and evenly spaced others
    most_seeds: int = 0  # seeds per arm, drawn as separate lines on request

    @property
    def curves(self) -> list[Curve]:
        """The curves of all panels."""
        return [curve for _, curves in self.panels for curve in curves]

    @property
    def is_log(self) -> bool:
        """Whether the y axis is initially logarithmic."""
        return self.log and suits_log_scale([mean for curve in self.curves for mean in curve.means])

    def rows(self) -> list[Columns]:
        """Return the means with the ends of their bands, each followed by the first seeds of its arm."""
        lines = []
        for panel, curves in self.panels:
            for curve in curves:
                kept = evenly_spaced(len(curve.xs), self.most_points)
                common: Columns = {"panel": panel} if panel else {}
                common |= {"arm": curve.arm, "x": _rounded([curve.xs[place] for place in kept], 8)}
                mean = common | {"y": _rounded([curve.means[place] for place in kept])}
                if curve.bands:
                    low, high = zip(*(curve.band_ends[place] for place in kept), strict=True)
                    mean |= {"low": _rounded(low), "high": _rounded(high)}
                lines.append(mean)
                seeds = [*curve.by_seed.items()][: self.most_seeds] if len(curve.by_seed) > 1 else []
                for seed, points in seeds:
                    lines.append(common | {"seed": seed, "y": _rounded([points[curve.xs[place]] for place in kept])})
        return lines

    def chart(self, medium: Medium) -> alt.LayerChart | alt.FacetChart:
        """Return the chart; on a screen it has the parameters `hidden` (a list of arms), `bands` and `seeds`."""
        arms = {curve.arm: curve.style for curve in self.curves}
        legend = None if medium.interactive else _legend([*arms], medium)

        def by_arm(channel: Any, styles: Sequence[Any]) -> Any:
            scale = alt.Scale(domain=[*arms], range=[styles[style] for style in arms.values()])
            return channel("arm:N", legend=legend, title=None, scale=scale)

        encoded = {"x": self._x(), "y": self._y(), "color": by_arm(alt.Color, STYLE_COLORS)}
        band_y = {"y": alt.Y("low:Q", title=self.y_label), "y2": alt.Y2("high")}
        # for speed, encodings come last and layers hold the parameters: each call copies the whole chart
        visible = alt.Chart().transform_filter("indexof(hidden, datum.arm) < 0")
        mean = visible.transform_filter("!isValid(datum.seed)")
        hidden, bands = alt.param(name="hidden", value=[]), alt.param(name="bands", value=True)
        band = mean.transform_filter("bands && isValid(datum.high)").mark_area(opacity=0.16, clip=True)
        longest = max(len(curve.xs) for curve in self.curves)
        marked = f"(datum.place - 1) % {ceil(min(longest, MOST_POINTS) / MOST_MARKS)} == 0"
        points = mean.transform_window(place="row_number()", groupby=["arm", "panel"]).transform_filter(marked)
        points = points.mark_point(filled=True, size=2.2 * medium.letters, opacity=1, clip=True)
        if medium.interactive:
            # shift + wheel zooms, so that the plain wheel scrolls the page; drag pans; double-click resets
            zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")
            points = points.properties(name="points").add_params(zoom)  # Altair numbers views without a name
        layers = [
            band.add_params(hidden, bands).encode(**encoded | band_y),
            mean.mark_line(clip=True).encode(**encoded, strokeDash=by_arm(alt.StrokeDash, STYLE_DASHES)),
            points.encode(**encoded, shape=by_arm(alt.Shape, STYLE_SHAPES)),
        ]
        if self.zero:
            layers.insert(0, alt.Chart(alt.Data(values=[{}])).mark_rule().encode(y=alt.YDatum(0)))
        if self.levels:
            lines = alt.Chart(alt.Data(values=[{"label": label, "y": y} for label, y in self.levels.items()]))
            layers.insert(0, lines.mark_rule(strokeDash=[2, 2]).encode(y="y:Q"))
            text = lines.mark_text(align="right", dx=-2, dy=-0.6 * medium.letters, fontSize=0.9 * medium.letters)
            layers.append(text.encode(x=alt.XValue("width"), y="y:Q", text="label:N", color=alt.value("var(--muted)")))
        if medium.interactive:
            single = visible.transform_filter("seeds && isValid(datum.seed)")
            single = single.mark_line(strokeWidth=0.8, opacity=0.7, clip=True)
            single = single.add_params(alt.param(name="seeds", value=False))
            layers += [single.encode(**encoded, detail=alt.Detail("seed:N")), *_readout(mean, encoded, [*arms])]
        chart = alt.LayerChart(layer=layers, data=alt.NamedData("rows"))
        if self.panels[0][0]:
            return _faceted(chart.properties(height=10 * medium.letters), "panel", [title for title, _ in self.panels])
        return chart

    def _x(self) -> alt.X:
        tokens = self.x_label.endswith("tokens")
        axis = alt.Axis(tickCount=5, labelExpr=SHORT) if tokens else alt.Axis(tickCount=5, format="~g")
        log = self.log_x and suits_log_scale([x for curve in self.curves for x in curve.xs])
        scale = alt.Scale(type="log" if log else "linear", nice=False, padding=6)
        return alt.X("x:Q", title=self.x_label, axis=axis, scale=scale)

    def _y(self) -> alt.Y:
        scale = alt.Scale(zero=False, padding=6)
        if self.is_log:  # starts below the smallest mean, because a band may reach 0
            least = 0.9 * min(mean for curve in self.curves for mean in curve.means)
            scale = alt.Scale(type="log", domainMin=least, clamp=True, nice=False)
        return alt.Y("y:Q", title=self.y_label, scale=scale)


@dataclass(frozen=True)
class Interval:
    """A paired difference on its display scale."""

    arm: str
    mean: float
    low: float | None
    high: float | None
    conclusion: str
    text: str  # the mean with its interval
    short: str  # for narrow screens


@dataclass(frozen=True)
class Forest:
    """Differences from a baseline, one per row, the first at the top."""

    intervals: Sequence[Interval]
    x_label: str
    percent: bool = False

    def rows(self) -> list[Columns]:
        """Return the differences."""
        keys = ("arm", "mean", "low", "high", "conclusion")
        return [{key: [getattr(one, key) for one in self.intervals] for key in keys}]

    def chart(self, medium: Medium) -> alt.LayerChart:
        """Return the chart: a bar from low to high, a point at the mean, and the numbers; short ones with `narrow`."""
        arms = [one.arm for one in self.intervals]
        names = [wrap(arm, LONGEST_LINE) for arm in arms]
        at = f"indexof({json.dumps(arms)}, datum.value)"
        short, long = (json.dumps([getattr(one, key) for one in self.intervals]) for key in ("short", "text"))
        number = f"narrow ? {short}[{at}] : {long}[{at}]"
        bare: Any = {"domain": False, "ticks": False, "grid": False, "labelPadding": 8}
        name = f"{json.dumps(names)}[{at}]"
        up: Any = {"condition": {"test": f"length({name}) > 1", "value": -0.55 * medium.letters}, "value": 0}
        left = alt.Axis(labelExpr=name, labelOffset=up, labelLimit=200, **bare)
        right = alt.Axis(orient="right", labelExpr=number, labelLimit=320, **bare)
        ticks = alt.Axis(format="+.3~%" if self.percent else "+~g", tickCount=3, labelOverlap="greedy")
        rows = alt.Scale(domain=arms)  # including arms without an interval
        palette = alt.Scale(domain=[*CONCLUSIONS], range=[f"var(--{word.replace(' ', '-')})" for word in CONCLUSIONS])
        base = alt.Chart(alt.NamedData("rows")).encode(color=alt.Color("conclusion:N", legend=None, scale=palette))
        if medium.interactive:
            numbers = [alt.Tooltip(f"{key}:Q", format="+.4g") for key in ("mean", "low", "high")]
            base = base.encode(tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("conclusion:N"), *numbers])
        x, y = alt.X("low:Q", title=self.x_label, axis=ticks), alt.Y("arm:N", title=None, axis=left, scale=rows)
        bar = base.transform_filter("isValid(datum.low)").mark_bar(height=0.45 * medium.letters, opacity=0.55)
        bar = bar.encode(x=x, x2=alt.X2("high"), y=y)
        point = base.mark_point(filled=True, size=0.35 * medium.letters**2, opacity=1)
        point = point.encode(x=alt.X("mean:Q"), y=alt.Y("arm:N", title=None, axis=right, scale=rows))
        narrow = alt.param(name="narrow", value=medium.width < NARROW)
        zero = alt.Chart(alt.Data(values=[{}])).mark_rule().add_params(narrow).encode(x=alt.XDatum(0))
        height = medium.letters * (0.9 + 1.1 * max(map(len, names)))
        resolve = alt.Resolve(scale={"y": "independent"})
        return alt.LayerChart(layer=[zero, bar, point], height=height * len(arms), resolve=resolve)


@dataclass(frozen=True)
class Loads:
    """The load of each expert of each layer by arm, relative to the mean load of the layer."""

    maps: dict[str, list[list[float]]]

    def rows(self) -> list[Columns]:
        """Return the loads, one entry per layer."""
        return [
            {"arm": arm, "layer": layer, "expert": [*range(len(loads_E))], "load": _rounded(loads_E, 3)}
            for arm, loads_LE in self.maps.items()
            for layer, loads_E in enumerate(loads_LE)
        ]

    def chart(self, medium: Medium) -> alt.FacetChart:
        """Return the chart: layers by experts for each arm, on one color scale."""
        largest = max(2.0, *(max(loads_E) for loads_LE in self.maps.values() for loads_E in loads_LE))
        scale = alt.Scale(scheme="purpleorange", domain=[0, largest], domainMid=1)
        legend = alt.Legend(orient="bottom", title="load (1: even)", titleOrient="left", gradientLength=120)
        across, down = (alt.Axis(labelOverlap="greedy", labelSeparation=n, labelAngle=0, grid=False) for n in (4, 0))
        x, y = alt.X("expert:O", title="expert", axis=across), alt.Y("layer:O", title="layer", axis=down)
        cell = alt.Chart().mark_rect().encode(x=x, y=y, color=alt.Color("load:Q", scale=scale, legend=legend))
        if medium.interactive:
            names = [alt.Tooltip(name) for name in ("arm:N", "layer:O", "expert:O")]
            cell = cell.encode(tooltip=[*names, alt.Tooltip("load:Q", format=".2f")])
        height = medium.letters * min(14, max(5, *map(len, self.maps.values())))
        chart = alt.LayerChart(layer=[cell], data=alt.NamedData("rows"), height=height)
        return _faceted(chart, "arm", [*self.maps])


Figure = Lines | Forest | Loads


def theme(letters: float, font: str) -> dict[str, Any]:
    """Return the Vega config.

    Args:
        letters: font size, px.
        font: font families; Vega measures text on a canvas, which does not support `inherit`.
    """
    ink, muted, line = (f"var(--{name})" for name in ("ink", "muted", "line"))
    texts = {"labelColor": muted, "titleColor": muted, "labelFontSize": letters, "titleFontSize": letters}
    texts |= {"titleFontWeight": "normal"}
    thin = {"gridColor": line, "gridWidth": 0.7, "domainColor": line, "domainWidth": 0.7, "tickColor": line}
    legend = {"labelColor": ink, "orient": "top", "symbolOpacity": 1, "symbolSize": 4 * letters, "offset": letters}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "rule": {"color": muted},
        "line": {"strokeWidth": 0.14 * letters, "strokeJoin": "round"},
        "axis": texts | thin | {"tickWidth": 0.7},
        "axisX": {"grid": False},
        "axisBand": {"labelColor": ink},
        "header": texts | {"labelColor": ink, "labelAnchor": "start", "labelPadding": 2},
        "legend": texts | legend,
    }


def standalone(figure: Figure, medium: Medium = PAPER_COLUMN, caption: str = "") -> dict[str, Any]:
    """Return a spec with its data, on white."""
    spec = figure.chart(medium).to_dict(validate=False)
    config = theme(medium.letters, PAPER_FONT) | {"background": "white", "aria": False}
    if "facet" in spec:
        spec["spec"]["width"] = medium.width / 2 - 5 * medium.letters
    else:
        spec |= {"width": medium.width, "autosize": {"type": "fit-x", "contains": "padding"}}
        spec.setdefault("height", 0.55 * medium.width)
    if caption:
        lines = wrap(caption, medium.letters_per_line)
        spec["title"] = {"text": lines, "orient": "bottom", "anchor": "start", "color": "var(--muted)", "offset": 4}
        config["title"] = {"fontSize": 0.9 * medium.letters, "fontWeight": "normal"}
    spec |= {"config": config, "datasets": spec.get("datasets", {}) | {"rows": [*expand(figure.rows())]}}
    colored = re.sub(r"var\(--([\w-]+)\)", lambda match: PAPER_COLORS.get(match[1], match[0]), json.dumps(spec))
    return dict(json.loads(colored))


def svg(figure: Figure, medium: Medium = PAPER_COLUMN, caption: str = "") -> str:
    """Return an SVG with selectable text; the same figure always gives the same bytes."""
    text = str(vl_convert.vegalite_to_svg(standalone(figure, medium, caption), vl_version=VERSION))
    # Vega's ids depend on the figures drawn before in the process
    ids = [*dict.fromkeys(re.findall(r'id="(?:clip|gradient_)(\d+)"', text))]
    return re.sub(r'(?<=[#"])(clip|gradient_)(\d+)(?=[")])', lambda match: f"{match[1]}{ids.index(match[2])}", text)


def pdf(figure: Figure, medium: Medium = PAPER_COLUMN) -> bytes:
    """Return a PDF with selectable text."""
    return vl_convert.vegalite_to_pdf(standalone(figure, medium), vl_version=VERSION)


def expand(lines: Sequence[Columns]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset; must match page.js."""
    for line in lines:
        columns = {key: values for key, values in line.items() if isinstance(values, list)}
        for values in zip(*columns.values(), strict=True):
            yield line | dict(zip(columns, values, strict=True))


def suits_log_scale(values: Sequence[float]) -> bool:
    """Whether values are positive and span more than a factor of 4."""
    return min(values) > 0 and max(values) > 4 * min(values)


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` of the first `count` integers evenly spaced, including the first and the last."""
    if count <= most:
        return [*range(count)]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _rounded(values: Sequence[float], digits: int = 5) -> list[float]:
    """Round to significant digits; integers lose their decimal point to keep the page small."""
    rounded = [float(f"{value:.{digits}g}") for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _legend(arms: Sequence[str], medium: Medium) -> alt.Legend:
    """Return a legend with as many columns as fit."""
    widest = min(LONGEST_NAME, max(map(len, arms)))
    columns = max(1, medium.letters_per_line // (widest + 7))
    return alt.Legend(columns=columns, labelLimit=0.6 * medium.letters * LONGEST_NAME, symbolType="stroke")


def _readout(mean: alt.Chart, encoded: dict[str, Any], arms: Sequence[str]) -> list[alt.Chart]:
    """Return a dot on each line at the x nearest to the pointer, and a rule there whose tooltip lists all arms."""
    at = alt.selection_point(name="at", nearest=True, on="pointermove", clear="pointerout", fields=["x"], empty=False)
    dot = mean.transform_filter(at).mark_point(filled=True, size=40, opacity=1, clip=True).encode(**encoded)
    # an arm's name can be any text, but a field of an expression cannot: fields are `a0`, `a1`, ...
    place = f"'a' + indexof({json.dumps(list(arms))}, datum.arm)"
    tooltip = [alt.Tooltip("x:Q", title=encoded["x"]["title"], format=",")]
    tooltip += [alt.Tooltip(f"a{place}:Q", title=arm, format=".5~g") for place, arm in enumerate(arms)]
    rule = mean.transform_calculate(place=place).transform_pivot("place", value="y", groupby=["x"])
    rule = rule.mark_rule(strokeWidth=12, strokeOpacity=0).properties(name="readout").add_params(at)
    return [dot, rule.encode(x=encoded["x"], y=alt.YValue(0), y2=alt.Y2Value("height"), tooltip=tooltip)]


def _faceted(chart: alt.LayerChart, field: str, titles: Sequence[str]) -> alt.FacetChart:
    """Return a panel for each title, two per row so that they are readable on a phone."""
    names = json.dumps([wrap(title, LONGEST_TITLE) for title in titles])
    header = alt.Header(labelExpr=f"{names}[indexof({json.dumps(list(titles))}, datum.value)]")
    facet = alt.Facet(f"{field}:N", title=None, sort=[*titles], header=header)
    return chart.facet(facet=facet, columns=2, spacing=10)
