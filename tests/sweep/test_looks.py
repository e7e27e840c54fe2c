"""`until=decided` adds seeds until every arm is decided or there are `max_seeds`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.sweeping.looks import seeds_of_looks

TRAINED = "optim.warmup_steps=0"  # the fake runs have one step
ARMS = ("-m", "balancing=simbal,lbl", "seed=0-4", TRAINED, "until=decided")


@given(st.lists(st.integers(0, 99), min_size=2, max_size=9, unique=True), st.integers(2, 60))
def test_looks_add_every_seed_once_up_to_the_maximum(first, max_seeds):
    if len(first) > max_seeds:
        with pytest.raises(UserError, match=f"at most max_seeds={max_seeds}"):
            seeds_of_looks(first, max_seeds)
        return
    looks = seeds_of_looks(first, max_seeds)
    assert looks[0] == first
    assert len({seed for look in looks for seed in look}) == sum(map(len, looks)) == max_seeds
    assert all(len(look) == len(first) for look in looks[:-1])
    assert 0 < len(looks[-1]) <= len(first)


def test_a_large_difference_is_decided_at_an_early_look(app):
    app.behave(simbal=1.0)
    sweep = app.run(*ARMS, "max_seeds=20")
    assert sweep.returncode == 0, sweep.stderr
    assert "of at most 20 seeds: simbal worse" in sweep.stdout
    assert len(app.started) == 10
    assert "not corrected for the looks" in sweep.stdout.replace("\n", " ")


def test_an_early_look_needs_a_clearer_difference_than_the_table(app):
    """After five seeds the 95% interval excludes 0, but not the interval at the level of the first look."""
    app.behave(simbal=0.1)
    sweep = app.run(*ARMS, "max_seeds=20")
    assert "5 of at most 20 seeds: simbal not yet decided" in sweep.stdout
    assert "10 of at most 20 seeds: simbal worse" in sweep.stdout
    assert len(app.started) == 20


def test_an_undecided_comparison_ends_at_the_last_seed_and_is_found_again(app):
    for _ in range(2):
        sweep = app.run(*ARMS, "max_seeds=12", "equivalence_margin=0.001")
        assert "5 of at most 12 seeds: simbal not yet decided" in sweep.stdout
        assert "12 of at most 12 seeds: simbal not resolved" in sweep.stdout
        assert app.started == sorted([*range(12), *range(12)])


def test_the_baseline_and_the_margin_of_the_command_count(app):
    sweep = app.run(*ARMS, "max_seeds=10", "baseline=simbal", "equivalence_margin=0.5")
    assert "of at most 10 seeds: lbl equivalent\n" in sweep.stdout


def test_other_runs_in_the_folder_decide_nothing(app):
    app.behave(simbal=1.0, lf=0.5)
    app.run(*ARMS[:-1])
    sweep = app.run("-m", "balancing=lf,none", "seed=0-4", "baseline=none", TRAINED, "until=decided", "max_seeds=10")
    assert "seeds: lf worse\n" in sweep.stdout


def test_a_failed_seed_ends_the_sweep(app):
    app.behave({3: "crash"})
    sweep = app.run(*ARMS)
    assert sweep.returncode == 1
    assert "2 of 10 runs have not finished" in sweep.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("-m", "balancing=simbal", "seed=0-1"), "only in its balancing"),
        (("-m", "balancing=simbal,lbl", "seed=0"), "at least two seeds"),
        (("-m", "name=a,b", "seed=0-1"), "single name="),
        ((), "add -m"),
        (("-m", "hydra/sweeper=optuna", "optim.lr=1,2"), "hydra/sweeper=grid"),
    ],
)
def test_until_decided_is_refused_for_undecidable_sweeps(app, arguments, named):
    sweep = app.run(*arguments, "until=decided")
    assert sweep.returncode == (1 if "-m" in arguments else 2)
    assert named in sweep.stderr
    assert not app.started
