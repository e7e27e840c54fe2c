"""Differences over studies of several budgets are those of the rows, paired by seed and by setting."""

import pytest

from simbal.errors import UserError
from simbal.report.reproduce.budgets import budgets
from simbal.report.reproduce.drawing import draw, write_curves

GROUP = {"of": ["short", "long"], "arm": "lbl", "rivals": ["none", "frozen", "dense"]}
HEADINGS = "arm,balancing,setting,seed,run,val/loss,tokens_per_expert_parameter"


@pytest.fixture
def results(tmp_path):
    """Two studies of arms with seeds 0 and 1; of `frozen` the long one has seed 1 alone, and of K=2 nothing but lbl."""
    mixture, dense, wide = (f"model.num_experts={experts} model.top_k={k}" for experts, k in ((8, 1), (0, 1), (8, 2)))
    losses = {
        "short": {("lbl", mixture): (4.0, 4.2), ("none", mixture): (3.5, 3.5), ("none", dense): (4.0, 4.0)},
        "long": {
            ("lbl", mixture): (3.0, 3.5), ("none", mixture): (3.25, 3.25), ("frozen", mixture): (None, 3.0),
            ("none", dense): (3.75, 4.0), ("lbl", wide): (2.0, 2.0),
        },
    }  # fmt: skip
    for place, (name, arms) in enumerate(losses.items(), 1):
        lines = [
            f"{balancing} {setting},{balancing},{setting},{seed},run,{loss},{'' if setting == dense else 10 * place}"
            for (balancing, setting), of_seeds in arms.items()
            for seed, loss in enumerate(of_seeds)
            if loss is not None
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.csv").write_text("\n".join([HEADINGS, *lines]) + "\n")
    return tmp_path


def test_each_line_has_the_paired_differences_of_a_setting_by_what_its_experts_have_seen(results):
    found = budgets(GROUP, results)
    assert [*found] == ["gap-none", "gap-frozen", "gap-dense"]
    for name, means, sds in (("none", [0.6, 0.0], [0.1, 0.25]), ("dense", [0.1, -0.625], [0.1, 0.125])):
        (line,) = found[f"gap-{name}"]
        assert (line.name, line.xs) == ("num_experts=8 top_k=1", [10, 20])
        assert line.means == pytest.approx(means)
        assert line.bands == pytest.approx([2**0.5 * sd for sd in sds])
    (line,) = found["gap-frozen"]
    assert (line.xs, line.means, line.bands) == ([20], [0.5], None)


def test_they_are_drawn_with_all_there_is_and_nothing_else(results):
    write_curves(budgets(GROUP, results), results / "long")
    draw(results / "long")
    assert {file.name for file in (results / "long").glob("*.svg")} == {
        "gap-none.svg", "gap-frozen.svg", "gap-dense.svg"
    }  # fmt: skip
    assert "nats above frozen" in (results / "long" / "gap-frozen.svg").read_text()


def test_a_study_that_is_not_there_and_too_many_settings_are_refused(results):
    with pytest.raises(UserError, match=r"there is no .*never_done/rows.csv: reproduce the study first"):
        budgets(GROUP | {"of": ["short", "never_done"]}, results)
    lines = [f"{arm} {k},{arm},model.top_k={k},0,run,3.0,{k}" for k in range(1, 14) for arm in ("lbl", "none")]
    (results / "long/rows.csv").write_text("\n".join([HEADINGS, *lines]) + "\n")
    with pytest.raises(UserError, match="short, long have 14 settings, of which a figure shows 12"):
        budgets(GROUP, results)
