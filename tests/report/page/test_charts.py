"""Figures as files: text stays text in SVG and PDF, and every arm and interval is drawn."""

import csv
import re
from xml.etree import ElementTree

import pytest

from simbal.report import charts
from simbal.report.charts import Forest, Interval, Lines, Loads
from simbal.report.curves import Curve
from simbal.report.figures import cards, curves_csv
from simbal.report.report import read_table, report

LINE = Curve("lbl", 0, [0, 1000, 2000], [3.0, 2.0, 1.0], [0.1, 0.2, 0.3], None, {0: {0: 3.1, 1000: 2.1, 2000: 1.1}})
OTHER = Curve("simbal", 1, [0, 1000, 2000], [3.0, 2.5, 1.5], None)


def texts(figure, *arguments):
    root = ElementTree.fromstring(charts.svg(figure, *arguments))
    return {"".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")}


def test_curves_are_drawn_in_the_colors_of_their_arms_with_a_legend_and_a_caption():
    figure = Lines([("", [LINE, OTHER])], "training tokens", "nats")
    assert {"lbl", "simbal", "training tokens", "nats", "2k", "what bands are"} <= texts(
        figure, charts.DOCUMENT, "what bands are"
    )
    drawn = charts.svg(figure)
    assert drawn == charts.svg(figure)
    assert charts.COLORS[0] in drawn
    assert charts.COLORS[1] in drawn
    assert "var(--" not in drawn


def test_the_rows_of_a_chart_are_means_with_band_ends_and_keep_the_ends_of_a_line():
    rows = [*charts.expand(Lines([("", [LINE, OTHER])], "x", "y").rows())]
    assert [row["y"] for row in rows] == [*LINE.means, *OTHER.means]
    assert [row["x"] for row in rows] == [*LINE.xs, *OTHER.xs]
    assert [row.get("high") for row in rows] == [3.1, 2.2, 1.3, None, None, None]
    long = Curve("lbl", 0, [*range(1000)], [1.0] * 1000, None)
    xs = [row["x"] for row in charts.expand(Lines([("", [long])], "x", "y", most_points=50).rows())]
    assert (len(xs), xs[0], xs[-1]) == (50, 0, 999)


def test_panels_and_load_maps_have_their_titles():
    panels = Lines([(f"layer {layer}", [LINE, OTHER]) for layer in range(3)], "training tokens", "PES")
    assert {"layer 0", "layer 1", "layer 2"} <= texts(panels)
    maps = Loads({f"arm {i}": [[2.0, 1.0, 0.5, 0.0]] * 3 for i in range(3)})
    assert {"arm 0", "arm 1", "arm 2", "expert"} <= texts(maps)


def test_an_interval_is_drawn_from_end_to_end_beside_its_numbers():
    one = Interval("simbal", -0.1, -0.15, -0.05, "better", "-0.1 [-0.15, -0.05] better", "-0.1 better")
    single = Interval("none", 0.1, None, None, "not resolved", "+0.1 not resolved", "+0.1 not resolved")
    forest = Forest([one, single], "difference")
    assert {"simbal", "none", "-0.1 [-0.15, -0.05] better", "difference"} <= texts(forest, charts.DOCUMENT)
    assert "-0.1 better" in texts(forest)
    assert charts.CONCLUSIONS["better"] in charts.svg(forest)


@pytest.fixture
def sweep_of_two(write_run, sweep):
    for balancing in ("lbl", "simbal"):
        for seed in (0, 1):
            write_run(balancing, seed)
    return sweep


def test_report_writes_figures_with_text_on_request(sweep_of_two):
    report(sweep_of_two, figures=True)
    written = {file.name for file in (sweep_of_two / "figures").iterdir()}
    assert {"loss.svg", "loss.pdf", "loads.pdf", "pes.pdf", "difference-val-ppl.svg", "curves.csv"} <= written
    pdf = (sweep_of_two / "figures/loss.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf or b"/FontFile3" in pdf  # letters, not paths
    assert b"/Type3" not in pdf
    assert re.search(r"<text[^>]*>simbal</text>", (sweep_of_two / "figures/loss.svg").read_text())


def test_a_csv_file_has_the_numbers_drawn(sweep_of_two):
    found = cards(read_table(sweep_of_two), sweep_of_two)
    lines = [*csv.DictReader(curves_csv(found).splitlines())]
    assert {line["figure"] for line in lines} == {card.name for card in found if isinstance(card.figure, Lines)}
    first = next(line for line in lines if line["figure"] == "loss" and line["arm"] == "simbal")
    assert (float(first["x"]), float(first["mean"])) == (0, 8.5)
    assert first["band"] == "95% interval of the difference from lbl"
    assert float(first["low"]) <= 8.5 <= float(first["high"])
    assert {line["panel"] for line in lines if line["figure"] == "pes"} == {"layer 0", "layer 1"}
