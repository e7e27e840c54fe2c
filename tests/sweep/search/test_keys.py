"""Hydra finds the sweeper of searches, and a grid refuses the keys of a search."""

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from tests.composing import refusal


def test_a_grid_takes_no_search():
    code, said = refusal("train.py", ["-m", "sweeps=coefficient_search", "hydra/sweeper=grid"])
    assert code == 2
    assert "n_trials" in said


def test_hydra_lists_our_sweeper():
    assert "OptunaSweeper" in {plugin.__name__ for plugin in Plugins.instance().discover(Sweeper)}
