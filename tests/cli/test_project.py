"""Configs of the folder in which one stands are found beside simbal's own, by the command line as well as by Hydra."""

import pytest
from hydra import compose, initialize_config_dir

from simbal.cli.help import help_page
from simbal.config.options import CONF
from tests.in_process import run

MINE = "# a strategy of my own\nmine:\n  _target_: mine.Mine\n  strength: 0.5\n"
SWEEP = "# @package _global_\n# Is it better?\nhydra: {sweeper: {params: {balancing: 'mine,lbl'}}}\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with a strategy, a model and a named sweep, and folders that are no concern of simbal."""
    for name in ("conf/balancing", "conf/model", "sweeps", "seed", "balancing"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "conf/balancing/mine.yaml").write_text(MINE)
    (tmp_path / "conf/model/mine.yaml").write_text("defaults: [tiny]\nnum_layers: 3\n")
    (tmp_path / "sweeps/better.yaml").write_text(SWEEP)
    (tmp_path / "balancing/other.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides], return_hydra_config=True)


def test_its_options_and_sweeps_are_offered_and_listed(project):
    for typed, meant in [
        ("balancing=mine balancing.mine.strenght=2", "balancing.mine.strength"),
        ("balancing=mime", "mine"),
        ("-m sweeps=beter", "better"),
    ]:
        done = run(project, "train.py", *typed.split())
        assert done.returncode == 2
        assert meant in done.stderr.partition("did you mean")[2]
    assert "a strategy of my own" in help_page("", "config", ["balancing"])
    assert "Is it better?" in help_page("", "config", ["sweeps"])


def test_hydra_composes_them(project):
    cfg = composed("balancing=mine", "model=mine", "sweeps=better", "seed=1")  # though there is a folder seed/
    assert cfg.balancing.mine.strength == 0.5
    assert (cfg.model.num_layers, cfg.model.d_model, cfg.seed) == (3, 128, 1)
    assert cfg.hydra.sweeper.params.balancing == "mine,lbl"
