import base64
import io
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from simbal.report.page import figures
from simbal.report.page.figures import LoadMap
from simbal.report.page.series import Curve
from simbal.report.page.styles import color
from simbal.report.page.svg import inline, svg

LINE = Curve("lbl", 0, [0, 1000, 2000], [3.0, 2.0, 1.0], [0.1, 0.2, 0.3])
OTHER = Curve("simbal", 1, [0, 1000, 2000], [3.0, 2.5, 1.5], None)
HOSTILE = "</text><script>alert(1)</script>$\\frac{\x00漢 & \"'"


def drawn(figure):
    """The lines that have data, by axes."""
    return [[line for line in axes.get_lines() if len(line.get_xdata()) > 2] for axes in figure.axes]


def test_curves_draw_each_arm_as_it_is_and_a_band_where_there_are_seeds():
    figure = figures.curves([LINE, OTHER], "training tokens", "nats")
    (lines,) = drawn(figure)
    assert [list(line.get_ydata()) for line in lines] == [LINE.means, OTHER.means]
    assert [line.get_color() for line in lines] == [color(0), color(1)]
    (band,) = figure.axes[0].collections
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(3.1)


def test_intervals_draw_one_line_for_each_arm_from_the_top():
    points = [Curve("simbal", 0, [2.9], [-0.1], [0.05], "lbl"), Curve("none", 0, [3.1], [0.1], None, "lbl")]
    (axes,) = figures.intervals(points, "difference").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["simbal", "none"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    (interval,) = axes.collections
    assert interval.get_segments()[0].ravel().tolist() == pytest.approx([-0.15, 0, -0.05, 0])


def test_panels_draw_every_layer():
    figure = figures.panels([(f"layer {layer}", [LINE, OTHER]) for layer in range(3)], "training tokens", "PES")
    assert [len(lines) for lines in drawn(figure)] == [2, 2, 2]


@pytest.mark.parametrize("count", [1, 3])
def test_load_maps_show_every_expert_of_every_layer(count):
    maps = [LoadMap(f"arm {i}", [[2.0, 1.0, 0.5, 0.0]] * 3) for i in range(count)]
    text = svg(figures.load_maps(maps), "loads")
    images = [Image.open(io.BytesIO(base64.b64decode(found))) for found in re.findall(r"base64,\s*([^\"]+)", text)]
    assert [image.size for image in images] == [(4, 3)] * count + [(128, 1)]
    top = [images[0].convert("RGB").getpixel((x, 0)) for x in range(4)]
    assert len(set(top)) == 4


def test_a_wide_range_gets_a_logarithmic_scale_and_a_narrow_one_does_not():
    wide = Curve("a", 0, [0, 1], [10.0, 1000.0], None)
    assert figures.curves([wide], "x", "y", log=True).axes[0].get_yscale() == "log"
    assert figures.curves([LINE], "x", "y", log=True).axes[0].get_yscale() == "linear"


def test_a_hostile_name_stays_text():
    curve = Curve(HOSTILE, 0, [0, 1], [1.0, 2.0], None)
    markup = inline(svg(figures.curves([curve], HOSTILE, "y"), "name"), "name", HOSTILE)
    root = ElementTree.fromstring(markup)
    assert {element.tag for element in root.iter()} <= {"svg", "g", "path", "text", "defs", "use", "clipPath", "rect"}
    assert any("<script>" in (element.text or "") for element in root.iter("text"))
    assert "<script" not in markup


def test_inline_figures_share_no_id_point_only_to_their_own_and_follow_the_page():
    text = svg(figures.curves([LINE], "x", "y"), "one")
    one, two = inline(text, "one", "a"), inline(text, "two", "b")
    ids = [set(re.findall(r' id="([^"]+)"', markup)) for markup in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for markup, own in zip((one, two), ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', markup)) == own
        assert "<style" not in markup
        assert "var(--arm0)" in markup
