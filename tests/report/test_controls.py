"""A table says that it has no control, or that a control is as good as a learnt router."""

import pytest

from simbal.report.collect import collect
from simbal.report.notes import is_control, notes
from simbal.report.table import build

UNIFORM = {"balancing.uniform._target_": "simbal.balancing.controls.UniformRouting"}
NONE = {"balancing.none._target_": "simbal.balancing.controls.NoBalancing"}
DENSE = {"model.num_experts": 0}


def of_controls(folder):
    return [note for note in notes(build("t", collect(folder))) if "control" in note]


@pytest.fixture
def write_arm(write_run):
    def write(name, *losses, keys=None):
        for seed, loss in enumerate(losses):
            run = write_run(name, seed, keys=keys or {}, metrics={"val/ppl": loss})
        return run.parent

    return write


def test_a_table_of_learnt_routers_alone_has_no_control(write_arm):
    write_arm("lbl", 20.0, 21.0)
    write_arm("none", 22.0, 23.0, keys=NONE)
    (note,) = of_controls(write_arm("simbal", 19.0, 20.5))
    assert note.startswith("No arm is a control")


def test_one_arm_and_dense_arms_need_none(write_arm):
    assert of_controls(write_arm("lbl", 20.0, 21.0)) == []
    assert of_controls(write_arm("none", 20.0, 21.0, keys=DENSE)) == []


def test_a_control_that_is_clearly_worse_is_passed_over(write_arm):
    write_arm("uniform", 30.0, 31.1, 29.2, keys=UNIFORM)
    folder = write_arm("lbl", 20.0, 20.9, 19.5)
    assert [is_control(row.arm) for row in build("t", collect(folder)).rows] == [False, True]
    assert of_controls(folder) == []


@pytest.mark.parametrize("losses", [(20.1, 20.8, 19.9), (10.0, 10.9, 9.5), (30.0,)])
def test_a_control_that_is_not_significantly_worse_is_named_with_whom_it_equals(write_arm, losses):
    write_arm("uniform", *losses, keys=UNIFORM)
    write_arm("simbal", 5.0, 5.2, 4.9)
    folder = write_arm("lbl", 20.0, 20.9, 19.5)
    (note,) = of_controls(folder)
    assert "uniform, a control, is not significantly worse in perplexity than lbl" in note
    assert ("simbal" in note) == (len(losses) == 1)


def test_a_control_is_compared_with_arms_that_are_like_it_in_all_else_or_with_all_where_there_are_none(write_arm):
    write_arm("uniform", 20.0, 21.0, keys=UNIFORM | {"optim.lr": 0.1})
    (note,) = of_controls(write_arm("lbl", 20.0, 21.0))
    assert "than lbl lr=" in note
    (note,) = of_controls(write_arm("simbal", 20.0, 21.0, keys={"optim.lr": 0.1}))
    assert "than simbal lr=0.1:" in note
