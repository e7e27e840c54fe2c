"""An arm looks the same in every study, and arms of a figure differ, even for color-blind readers."""

from itertools import combinations

import numpy as np
import pytest

from simbal.report.charts import COLORS, STYLE_COLORS, STYLE_DASHES, STYLE_SHAPES
from simbal.report.curves import KNOWN, NUM_STYLES, arm_styles

SIGHT = {  # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "full": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # of sRGB


def linear(text: str) -> np.ndarray:
    value = np.array([int(text[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(XYZ @ rgb.clip(0, 1) / [0.9505, 1, 1.089])  # the linear part, of near black, is left out
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_ten_colors_are_distinguishable_with_any_color_vision(sight):
    seen = [lab(np.array(SIGHT[sight]) @ linear(each)) for each in COLORS]
    assert len(seen) >= 10
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 14


def test_every_color_has_enough_contrast_on_white():
    """The contrast that WCAG 2.1 asks of graphics, 3 to 1."""
    assert min(1.05 / ((XYZ @ linear(each))[1] + 0.05) for each in COLORS) > 3


def test_styles_differ_in_color_and_in_dashes_and_shape():
    assert len({*zip(STYLE_COLORS, map(str, STYLE_DASHES), strict=True)}) == NUM_STYLES
    assert len({*zip(STYLE_COLORS, STYLE_SHAPES, strict=True)}) == NUM_STYLES


def test_a_known_strategy_has_its_own_style_in_every_study():
    assert arm_styles(["none", "simbal"]) == [KNOWN.index("none"), KNOWN.index("simbal")]
    assert arm_styles(["simbal", "mine", "lbl"]) == [1, 2, 0]
