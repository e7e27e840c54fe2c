"""Keys of hydra.sweeper: a slip is one sentence that says what is allowed."""

import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from simbal.cli import command_line
from simbal.errors import UserError
from simbal.sweep.search.settings import SearchSettings

CONF = Path(__file__).parents[3] / "conf"
COEF = "balancing.simbal.coef=tag(log,interval(1e-3,10))"


def check(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
    command_line.check(CONF, "About.")
    return sys.argv[2:]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("n_trails=3", "hydra.sweeper.n_trails: there is no such key; hydra.sweeper has params, arms, sampler, "),
        ("n_trials=many", "hydra.sweeper.n_trials must be a whole number or null"),
        ("objectives=val/ppl", "hydra.sweeper.objectives must be a list such as [a,b]"),
        ("max_failure_rate=often", "hydra.sweeper.max_failure_rate must be a number"),
        ("take_over=3.5", "hydra.sweeper.take_over must be true or false"),
    ],
)
def test_a_key_that_there_is_not_or_a_value_of_another_kind(monkeypatch, capsys, key, sentence):
    with pytest.raises(SystemExit, match="2"):
        check(monkeypatch, "hydra/sweeper=optuna", COEF, f"hydra.sweeper.{key}")
    assert sentence in capsys.readouterr().err


def test_a_key_of_a_named_sweep_is_checked_as_well(monkeypatch, capsys, tmp_path):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /hydra/sweeper: optuna]\nhydra: {sweeper: {samplr: tpe}}\n"
    )
    with pytest.raises(SystemExit, match="2"):
        check(monkeypatch, f"--config-dir={tmp_path}", "sweeps=mine")
    assert "sweeps=mine: hydra.sweeper.samplr: there is no such key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampler": "cmaes"}, "hydra.sweeper.sampler=cmaes is not one of tpe, random, grid"),
        ({"pruner": "mean"}, "is not one of none, median, hyperband, successive_halving"),
        ({"directions": ["up"]}, "hydra.sweeper.directions=up is not one of minimize, maximize"),
        ({"objectives": ["a", "b"]}, "for each of hydra.sweeper.objectives=[a,b]"),
        ({"objectives": []}, "must name one metric or several"),
        ({"objectives": ["a", "b"], "directions": ["minimize"] * 2, "pruner": "median"}, "needs a single objective"),
        ({"n_trials": 0}, "hydra.sweeper.n_trials=0 must be at least 1"),
        ({"sampler_seed": -1}, "hydra.sweeper.sampler_seed=-1 must be at least 0"),
        ({"max_failure_rate": 2.0}, "hydra.sweeper.max_failure_rate=2.0 must lie between 0 and 1"),
    ],
)
def test_a_value_that_is_not_allowed(settings, sentence):
    with pytest.raises(UserError) as error:
        SearchSettings(**settings).check()
    assert sentence in str(error.value)


def test_the_named_search_passes_and_chooses_its_sweeper(monkeypatch):
    assert check(monkeypatch, "sweeps=coefficient_search") == ["sweeps=coefficient_search", "hydra/sweeper=optuna"]


def test_a_sweeper_on_the_command_line_wins(monkeypatch):
    given = ["sweeps=significance", "hydra/sweeper=optuna"]
    assert check(monkeypatch, *given) == given


def test_a_grid_takes_no_search(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        check(monkeypatch, "sweeps=coefficient_search", "hydra/sweeper=grid")
    assert (
        "sweeps=coefficient_search: hydra.sweeper has no key n_trials (there is params, arms)"
        in capsys.readouterr().err
    )


def test_hydra_lists_our_sweeper():
    assert "OptunaSweeper" in {plugin.__name__ for plugin in Plugins.instance().discover(Sweeper)}
