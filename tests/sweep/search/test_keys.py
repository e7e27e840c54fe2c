"""Which sweeper a command line chooses, and what that takes."""

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from simbal.config.catalogue import Catalogue, conf_here
from tests.conftest import CONF


def test_the_named_search_passes_and_chooses_its_sweeper(check):
    given = ["-m", "sweeps=coefficient_search"]
    assert check(*given) == [*given, "hydra/sweeper=optuna"]


@pytest.mark.parametrize("model", ["", ", override /model: bench"])
def test_a_sweep_that_inherits_a_search_is_one(check, monkeypatch, tmp_path, model):
    file = tmp_path / "conf/sweeps/mine.yaml"
    file.parent.mkdir(parents=True)
    own = f"defaults: [coefficient_search{model}]\nhydra: {{sweeper: {{n_trials: 3, params: {{data.seed: 1}}}}}}\n"
    file.write_text(f"# @package _global_\n{own}")
    monkeypatch.chdir(tmp_path)
    assert check("-m", "sweeps=mine") == ["-m", "sweeps=mine", "hydra/sweeper=optuna"]
    _, keys = Catalogue([CONF, *conf_here()]).sweeper("mine")
    assert (keys["n_trials"], keys["params"], len(keys["arms"])) == (3, {"seed": "0-2", "data.seed": 1}, 2)


def test_a_sweeper_on_the_command_line_wins(check):
    given = ["-m", "sweeps=significance", "hydra/sweeper=optuna"]
    assert check(*given) == given


def test_a_grid_takes_no_search(check):
    code, _, said = check("-m", "sweeps=coefficient_search", "hydra/sweeper=grid")
    assert code == 2
    assert "sweeps=coefficient_search: hydra.sweeper has no key n_trials (there is params, arms)" in said


def test_hydra_lists_our_sweeper():
    assert "OptunaSweeper" in {plugin.__name__ for plugin in Plugins.instance().discover(Sweeper)}
