"""Configs of the folder in which one stands are found beside simbal's own, by the command line as well as by Hydra."""

import pytest
from hydra import compose, initialize_config_dir

from simbal.config.catalogue import CONF

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


def test_its_options_and_sweeps_are_checked_and_listed(project, check):
    arguments = ["-m", "sweeps=better", "balancing.mine.strength=2"]
    assert check(*arguments) == arguments
    assert "did you mean balancing.mine.strength?" in check("balancing=mine", "balancing.mine.strenght=2")[2]
    assert "balancing has no option mime; did you mean mine?" in check("balancing=mime")[2]
    assert "sweeps has no option beter; did you mean better?" in check("-m", "sweeps=beter")[2]
    page = check("--help")[1]
    assert "a strategy of my own" in page
    assert "Is it better?" in page


def test_hydra_composes_them(project):
    cfg = composed("balancing=mine", "model=mine", "sweeps=better", "seed=1")  # though there is a folder seed/
    assert cfg.balancing.mine.strength == 0.5
    assert (cfg.model.num_layers, cfg.model.d_model, cfg.seed) == (3, 128, 1)
    assert cfg.hydra.sweeper.params.balancing == "mine,lbl"


@pytest.mark.parametrize(
    ("file", "refused"),
    [
        ("conf/model/tiny.yaml", "conf/model/tiny.yaml is never read, as "),
        ("conf/config.yaml", "conf/config.yaml is never read, as "),
        ("sweeps/significance.yaml", "sweeps/significance.yaml is never read, as "),
    ],
)
def test_a_file_with_the_name_of_one_of_simbal_is_refused_unless_it_is_the_same(project, check, file, refused):
    (project / file).write_bytes((CONF / file.removeprefix("conf/")).read_bytes())
    assert check("seed=1") == ["seed=1"]
    (project / file).write_text("num_layers: 7\n")
    code, _, said = check("seed=1")
    assert code == 2
    assert said.startswith(f"error: {refused}")
    assert said.endswith("has its name: give it another name\n")


def test_a_config_path_stands_instead_of_all_and_is_relative_to_the_current_folder(project, check):
    (project / "other").mkdir()
    (project / "other/config.yaml").write_text("seed: 3  # of it\n")
    assert check("--config-path=other", "seed=4")[-2:] == [f"--config-path={project}/other", "seed=4"]
    assert "there is no key balancing" in check("--config-path=other", "balancing=mine")[2]
