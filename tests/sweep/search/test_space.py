"""Search spaces in Hydra's own grammar."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from simbal.config.catalogue import split_arm
from simbal.config.schema import integer_keys
from simbal.errors import UserError
from simbal.sweep import spans
from simbal.sweep.search import space


def build(*lines, replicates="seed", grid=False):
    overrides = spans.parse(lines, integer_keys(), OverridesParser.create())
    return space.build(overrides, replicates, integer_keys(), grid=grid)


@pytest.mark.parametrize(
    ("line", "distribution"),
    [
        ("optim.lr=interval(0,1)", FloatDistribution(0, 1)),
        ("optim.lr=tag(log,interval(1e-4,1))", FloatDistribution(1e-4, 1, log=True)),
        ("optim.lr=tag(log, interval(1, 10))", FloatDistribution(1, 10, log=True)),
        ("optim.lr=int(interval(1,64))", IntDistribution(1, 64)),
        ("optim.lr=tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("model.top_k=interval(1,8)", IntDistribution(1, 8)),  # a whole number by its type
        ("model.top_k=range(2,9,2)", IntDistribution(2, 8, step=2)),
        ("model.top_k=2-4", CategoricalDistribution(["2", "3", "4"])),
        ("optim.lr=range(0,1,0.5)", CategoricalDistribution(["0.0", "0.5"])),
        ("optim.lr=1e-3,1e-2,1e-3", CategoricalDistribution(["0.001", "0.01"])),
        ("balancing=choice(lbl,[lbl,simbal])", CategoricalDistribution(["lbl", "[lbl,simbal]"])),
        ("balancing=shuffle(lbl,simbal)", CategoricalDistribution(["lbl", "simbal"])),
    ],
)
def test_a_line_is_a_distribution(line, distribution):
    assert [*build(line).distributions.values()] == [distribution]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["optim.lr=interval(1,0)"], "an interval goes from a smaller number to a larger one"),
        (["optim.lr=tag(log,interval(0,1))"], "a logarithmic interval must begin above 0"),
        (["optim.lr=tag(log,choice(1,2))"], "log goes with an interval"),
        (["optim.lr=tag(exp,interval(1,2))"], "the tag exp means nothing here; log does"),
        (["model.top_k=interval(1.5,8)"], "the key is a whole number, so both ends must be"),
        (["optim.lr=1", "seed=0-2"], "there is nothing to search"),
        (["optim.lr=1,2", "seed=interval(0,3)"], "hydra.sweeper.replicates=seed takes values one by one"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(lines, sentence):
    with pytest.raises(UserError, match=sentence):
        build(*lines)


def test_a_grid_refuses_an_interval():
    with pytest.raises(UserError, match="a grid takes values one by one, not an interval"):
        build("optim.lr=interval(0,1)", grid=True)


def test_a_trial_runs_one_job_for_each_replicate():
    space = build("name=x", "optim.lr=interval(0,1)", "balancing=lbl,simbal", "seed=3-4")
    jobs = space.jobs({"optim.lr": 0.1, "balancing": "lbl"})
    assert jobs == [["name=x", "optim.lr=0.1", "balancing=lbl", f"seed={seed}"] for seed in (3, 4)]


def test_without_replicates_the_seed_is_searched_like_any_key():
    assert [*build("seed=0-1", replicates=None).distributions] == ["seed"]


def test_replicates_of_a_key_that_is_not_given_are_refused():
    with pytest.raises(UserError, match="hydra.sweeper.replicates=data.seed needs values: data.seed=a,b"):
        build("optim.lr=1,2", replicates="data.seed")


def test_the_later_of_two_overrides_counts():
    assert build("optim.lr=1,2", "model.top_k=2,4", "optim.lr=3").jobs({"model.top_k": "2"}) == [
        ["optim.lr=3", "model.top_k=2"]
    ]


def test_a_grid_is_every_point():
    space = build("optim.lr=1,2", "model.top_k=range(1,3)", grid=True)
    assert [tuple(point.values()) for point in space.grid()] == [("1", 1), ("1", 2), ("2", 1), ("2", 2)]


def test_probes_show_each_choice_and_both_ends():
    space = build("optim.lr=interval(0.5,1)", "balancing=a,b,c")
    probes = [tuple(point.values()) for point in space.probes()]
    assert probes == [(0.5, "a"), (1.0, "a"), (0.5, "b"), (0.5, "c")]


def test_blanks_within_an_interval_part_no_arm():
    arm = "balancing=simbal  balancing.simbal.coef=tag(log, interval(1e-3, 10)) ~x +y=1"
    assert split_arm(arm) == ["balancing=simbal", "balancing.simbal.coef=tag(log, interval(1e-3, 10))", "~x", "+y=1"]
