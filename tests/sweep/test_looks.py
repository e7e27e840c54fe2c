"""`until=decided` goes on with more seeds until every arm is decided, or there are `max_seeds`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.sweep.looks import seeds_of_looks

ARMS = ("-m", "balancing=simbal,lbl", "seed=0-4", "until=decided")


@given(st.lists(st.integers(0, 99), min_size=2, max_size=9, unique=True), st.integers(2, 60))
def test_looks_take_every_seed_once_and_as_many_as_allowed(first, most):
    if len(first) > most:
        with pytest.raises(UserError, match=f"at most max_seeds={most}"):
            seeds_of_looks(first, most)
        return
    looks = seeds_of_looks(first, most)
    assert looks[0] == first
    assert len({seed for look in looks for seed in look}) == sum(map(len, looks)) == most
    assert all(len(look) == len(first) for look in looks[:-1])
    assert 0 < len(looks[-1]) <= len(first)


def test_a_large_difference_is_decided_at_an_early_look(app):
    app.behave({}, simbal=1.0)
    sweep = app.run(*ARMS, "max_seeds=20")
    assert sweep.returncode == 0, sweep.stderr
    assert "of at most 20 seeds: simbal worse" in sweep.stdout
    assert len(app.started) in (10, 20)
    assert "not corrected for the looks" in sweep.stdout.replace("\n", " ")


def test_no_difference_goes_on_to_the_last_seed_and_says_so(app):
    sweep = app.run(*ARMS, "max_seeds=12", "equivalence_margin=0.001")
    assert "5 of at most 12 seeds: simbal not yet decided" in sweep.stdout
    assert "12 of at most 12 seeds: simbal not resolved" in sweep.stdout
    assert app.started == sorted([*range(12), *range(12)])
    again = app.run(*ARMS, "max_seeds=12", "equivalence_margin=0.001")
    assert "12 of at most 12 seeds: simbal not resolved" in again.stdout
    assert len(app.started) == 24


def test_equal_arms_are_found_equivalent_within_a_wide_margin(app):
    sweep = app.run(*ARMS, "max_seeds=10", "equivalence_margin=0.5")
    assert "seeds: simbal equivalent" in sweep.stdout


def test_a_failed_seed_ends_the_sweep_in_a_sentence(app):
    app.behave({3: "crash"})
    sweep = app.run(*ARMS)
    assert sweep.returncode == 1
    assert "2 of 10 runs have not finished, and a look needs them all" in sweep.stderr


def test_an_arm_that_fails_with_every_seed_is_not_left_out(app):
    app.behave({}, none="crash")
    sweep = app.run("-m", "balancing=simbal,none,lbl", "seed=0-4", "until=decided")
    assert sweep.returncode == 1
    assert "5 of 15 runs have not finished" in sweep.stderr


def test_what_was_in_the_folder_before_decides_nothing(app):
    app.behave({}, simbal=1.0, lf=0.5)
    app.run("-m", "balancing=simbal,lbl", "seed=0-4")
    sweep = app.run("-m", "balancing=lf,none", "seed=0-4", "baseline=none", "until=decided", "max_seeds=10")
    assert "seeds: lf worse\n" in sweep.stdout


def test_the_baseline_and_the_margin_are_those_of_the_command(app):
    app.run(*ARMS[:-1])
    sweep = app.run(*ARMS, "max_seeds=10", "baseline=simbal", "equivalence_margin=0.5")
    assert "of at most 10 seeds: lbl equivalent\n" in sweep.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("-m", "balancing=simbal", "seed=0-1", "until=decided"),
            "no arm differs from the baseline in balancing alone",
        ),
        (("-m", "balancing=simbal,lbl", "seed=0", "until=decided"), "looks after every 1 seeds"),
        (("-m", "name=a,b", "seed=0-1", "until=decided"), "the arms have several names"),
        (("until=decided",), "until=decided are for sweeps: add -m"),
        (("-m", "hydra/sweeper=optuna", "optim.lr=1,2", "until=decided"), "until=decided is for hydra/sweeper=grid"),
    ],
)
def test_what_cannot_be_decided_is_refused_in_a_sentence(app, arguments, says):
    sweep = app.run(*arguments)
    assert sweep.returncode == (1 if "-m" in arguments else 2)
    assert says in sweep.stderr
    assert not app.started
