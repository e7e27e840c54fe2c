"""Refactoring must not change the curves of short runs or the statistics of a table."""

import json

import pytest

from simbal.report.statistics import paired_difference
from tests.pinned.runs import CURVES, RUNS, curves, processor

KEPT = json.loads(CURVES.read_text())
FIRST_STEPS, TOLERANCE = 5, 1e-4  # on another processor: a choice of experts may flip later
SIGNS_OF_ROUNDING = {"simbal"}  # its first gradient, at an orthonormal W, is the sign of rounding errors


@pytest.mark.parametrize("name", RUNS)
def test_curves_are_unchanged(name, tmp_path):
    found = curves(name, tmp_path)
    if (kind := processor()) in KEPT:
        assert found == KEPT[kind][name]
        return
    if name in SIGNS_OF_ROUNDING:
        pytest.skip(f"the first gradient of {name} differs from processor to processor")
    for runs in KEPT.values():
        assert found.keys() == runs[name].keys()
        for key, values in runs[name].items():
            assert found[key][:FIRST_STEPS] == pytest.approx(values[:FIRST_STEPS], rel=TOLERANCE, abs=TOLERANCE), key


LOSSES = {
    "lbl": {0: 3.1319, 1: 3.1579, 2: 3.1421, 3: 3.1688, 4: 3.1502},
    "simbal": {0: 3.1812, 1: 3.2034, 2: 3.2150, 3: 3.1977, 4: 3.2101},
    "hash": {0: 3.0410, 1: 3.0377, 2: 3.0551, 3: 3.0492, 4: 3.0388},
}

PINNED = {  # at commit e29cee0: mean, sd, p of the paired t test
    "simbal": (0.05129999999999999, 0.016431068133265034, 0.0022142072174208835),
    "hash": (-0.10582000000000003, 0.015847775869187425, 0.00011720237275117789),
}


def test_the_statistics_of_one_table_are_unchanged():
    for arm, expected in PINNED.items():
        found = paired_difference(LOSSES[arm], LOSSES["lbl"])
        assert (found.mean, found.sd, found.p_paired) == pytest.approx(expected, rel=1e-9)
