import pytest

from simbal.report.page.sensitivity import sensitivity
from simbal.report.page.styles import MOST_ARMS

COEF, LBL, LR = "balancing.simbal.coef", "balancing.lbl.coef", "optim.lr"


@pytest.fixture
def lines(sweep, table_of):
    return lambda: {curve.name: curve for curve in sensitivity([row.arm for row in table_of(sweep).rows], "lbl")}


def test_a_line_goes_over_the_coefficient_and_the_baseline_without_one_is_level(write_run, lines):
    for coef, ppl in ((1.0, 12.0), (0.01, 8.0), (0.1, 10.0)):
        for seed in (0, 1):
            write_run("simbal", seed, keys={COEF: coef}, metrics={"val/ppl": ppl + 2 * seed})
    write_run("lbl", metrics={"val/ppl": 9.0})
    write_run("none", metrics={"val/ppl": 99.0})
    found = lines()
    over, level = found["simbal over coef"], found["lbl"]
    assert (over.xs, over.means, over.bands) == ([0.01, 0.1, 1.0], [9, 11, 13], pytest.approx([2**0.5] * 3))
    assert (level.xs, level.means, level.bands) == ([0.01, 0.1, 1.0], [9, 9, 9], None)
    assert over.style != level.style
    assert len(found) == 2  # nothing was varied in none


def test_each_kind_of_arm_goes_over_its_own_key(write_run, lines):
    for value in (0.1, 0.2, 0.3):
        write_run("simbal", keys={COEF: value}, metrics={"val/ppl": value})
        write_run("lbl", keys={LBL: 2 * value}, metrics={"val/ppl": 2 * value})
    found = lines()
    assert found["simbal over coef"].xs == found["simbal over coef"].means == [0.1, 0.2, 0.3]
    assert found["lbl over coef"].xs == found["lbl over coef"].means == [0.2, 0.4, 0.6]


def test_of_two_numbers_the_one_with_more_values_is_x_and_the_other_tells_lines_apart(write_run, lines):
    for lr in (0.1, 0.2, 0.3):
        for coef in (1.0, 2.0):
            write_run(keys={LR: lr, COEF: coef}, metrics={"val/ppl": lr + coef})
    found = lines()
    assert [*found] == ["simbal coef=1.0 over optim.lr", "simbal coef=2.0 over optim.lr"]
    assert found["simbal coef=2.0 over optim.lr"].means == pytest.approx([2.1, 2.2, 2.3])


def test_a_key_that_only_other_arms_have_tried_is_no_x_of_an_arm(write_run, lines):
    """With one learning rate for lbl and two coefficients, learning rates of simbal make no line of lbl over them."""
    for lr in (0.1, 0.2, 0.3, 0.4):
        write_run("simbal", keys={LR: lr}, metrics={"val/ppl": lr})
    for coef in (1.0, 2.0):
        write_run("lbl", keys={LR: 0.1, LBL: coef}, metrics={"val/ppl": coef})
    write_run("none", keys={LR: 0.1}, metrics={"val/ppl": 3.0})
    found = lines()
    assert found["lbl lr=0.1 over coef"].xs == [1.0, 2.0]
    assert found["simbal over optim.lr"].xs == [0.1, 0.2, 0.3, 0.4]
    assert len(found) == 2


def test_two_points_are_no_line(write_run, lines):
    write_run(keys={COEF: 0.1})
    write_run(keys={COEF: 0.2})
    assert lines() == {}


@pytest.mark.parametrize(("kinds", "shown"), [(MOST_ARMS, MOST_ARMS), (MOST_ARMS + 1, 0)])
def test_more_lines_than_can_be_told_apart_are_none(write_run, lines, kinds, shown):
    for kind in range(kinds):
        write_run(keys={"balancing.simbal.kind": f"kind {kind}", LR: 0.1}, metrics={"val/ppl": 1.0})
    for lr in (0.2, 0.3):
        write_run(keys={"balancing.simbal.kind": "kind 0", LR: lr}, metrics={"val/ppl": 1.0})
    assert len(lines()) == shown
