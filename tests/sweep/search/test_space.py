"""Search spaces in Hydra's grammar."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from simbal.config import spans
from simbal.config.options import split_arm
from simbal.config.schema import integer_keys
from simbal.errors import UserError
from simbal.sweeping.search.space import build_space


def build(*lines, replicates="seed"):
    overrides = spans.parse(lines, integer_keys(), OverridesParser.create())
    return build_space(overrides, replicates, integer_keys())


@pytest.mark.parametrize(
    ("line", "distribution"),
    [
        ("optim.lr=interval(0,1)", FloatDistribution(0, 1)),
        ("optim.lr=tag(log, interval(1e-4, 1))", FloatDistribution(1e-4, 1, log=True)),
        ("optim.lr=int(interval(1,64))", IntDistribution(1, 64)),
        ("optim.lr=tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("model.top_k=interval(1,8)", IntDistribution(1, 8)),  # the key is an integer
        ("model.top_k=range(2,9,2)", IntDistribution(2, 8, step=2)),
        ("model.top_k=2-4", CategoricalDistribution(["2", "3", "4"])),
        ("optim.lr=range(0,1,0.5)", CategoricalDistribution(["0.0", "0.5"])),
        ("optim.lr=1e-3,1e-2,1e-3", CategoricalDistribution(["0.001", "0.01"])),
        ("balancing=choice(lbl,[lbl,simbal])", CategoricalDistribution(["lbl", "[lbl,simbal]"])),
    ],
)
def test_a_line_is_a_distribution(line, distribution):
    assert [*build(line).distributions.values()] == [distribution]


def test_a_trial_has_one_job_for_each_replicate():
    space = build("name=x", "optim.lr=interval(0,1)", "balancing=lbl,simbal", "seed=3-4")
    jobs = space.jobs({"optim.lr": 0.1, "balancing": "lbl"})
    assert jobs == [["name=x", "optim.lr=0.1", "balancing=lbl", f"seed={seed}"] for seed in (3, 4)]
    assert [*build("seed=0-1", replicates=None).distributions] == ["seed"]


def test_a_later_override_replaces_an_earlier_one():
    jobs = build("optim.lr=1,2", "model.top_k=2,4", "optim.lr=3").jobs({"model.top_k": "2"})
    assert jobs == [["optim.lr=3", "model.top_k=2"]]


def test_replicates_are_listed_and_something_is_searched():
    with pytest.raises(UserError, match="needs a list of values"):
        build("seed=interval(0,4)", "optim.lr=1,2")
    with pytest.raises(UserError, match="nothing to search"):
        build("seed=0-4", "optim.lr=1")


def test_probes_cover_each_choice_and_both_ends():
    space = build("optim.lr=interval(0.5,1)", "balancing=a,b,c")
    probes = [tuple(point.values()) for point in space.probes()]
    assert probes == [(0.5, "a"), (1.0, "a"), (0.5, "b"), (0.5, "c")]


def test_spaces_within_an_interval_do_not_split_an_arm():
    arm = "balancing=simbal  balancing.simbal.coef=tag(log, interval(1e-3, 10)) ~x +y=1"
    assert split_arm(arm) == ["balancing=simbal", "balancing.simbal.coef=tag(log, interval(1e-3, 10))", "~x", "+y=1"]
