"""The command line: arguments for Hydra, errors in config files, the help page and exit codes."""

import pytest

from simbal.cli.help import help_page
from simbal.config.schema import GROUPS, every_key
from simbal.errors import ConfigError, exit_codes
from tests.composing import compose
from tests.conftest import CONF
from tests.in_process import run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["seed=3"], None),
        (["seed=3-3"], ["seed=3"]),
        (["-m", "seed=0-2,7"], ["-m", "seed=0,1,2,7"]),
        (["--multi", "balancing=simbal,lbl", "seed=0-1"], ["--multi", "balancing=simbal,lbl", "seed=0,1"]),
        (["hydra.mode=MULTIRUN", "seed=0-1"], ["hydra.mode=MULTIRUN", "seed=0,1"]),
        (["dry_run=true"], ["-m", "dry_run=true"]),
        (["balancing=lbl", "balancing.lbl.coef=1"], None),
        (["-m", "balancing.lbl.coef=1"], ["-m", "balancing.lbl.coef=choice(1)"]),
        (["-m", "balancing.lbl.coef=0.1,0.01"], None),
        (["-m", "sweeps=coefficient_search"], ["-m", "sweeps=coefficient_search", "hydra/sweeper=optuna"]),
        (["-m", "sweeps=coefficient_search", "hydra/sweeper=grid"], None),
        (["name='0-4'", "optim.betas=[0.9,0.99]"], None),
        (["--shell-completion", "query=bash"], None),
    ],
)
def test_hydra_receives_the_arguments_with_spans_expanded(check, arguments, expected):
    assert check(*arguments) == (expected or arguments)


def test_named_sweep_that_inherits_a_search_is_a_search(check, tmp_path, monkeypatch):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/mine.yaml").write_text("# @package _global_\ndefaults: [coefficient_search]\n")
    monkeypatch.chdir(tmp_path)
    assert check("-m", "sweeps=mine")[-1] == "hydra/sweeper=optuna"


@pytest.mark.parametrize("more", [[], ["balancing.simbal.coef=1,2"]])
def test_key_of_one_swept_option_is_set_in_its_runs_only(more):
    runs = compose(["data=synthetic", "-m", "balancing=simbal,lbl", "balancing.lbl.coef=0.1", *more])
    found = [(facts["choices"]["balancing"], facts["flat"].get("balancing.lbl.coef")) for facts in runs]
    assert found == [("simbal", None)] * (len(more) + 1) + [("lbl", 0.1)]


@pytest.mark.parametrize(
    ("text", "named"), [("num_layers: [1\n", "mine.yaml, line 2"), ("defaults: [tiny]\nrate: 1\n", "model.rate")]
)
def test_mistake_in_a_config_file_is_named(tmp_path, text, named):
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text(text)
    done = run(tmp_path, "train.py", "model=mine")
    assert done.returncode == 2
    assert named in done.stderr


@pytest.mark.parametrize("file", ["conf/model/tiny.yaml", "conf/config.yaml", "sweeps/significance.yaml"])
def test_file_that_would_never_be_read_is_refused(check, tmp_path, monkeypatch, file):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes((CONF.parent / file).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert check("seed=1") == ["seed=1"]
    (tmp_path / file).write_text("num_layers: 7\n")
    with pytest.raises(ConfigError, match=f"^{file} is never read"):
        check("seed=1")


def test_help_is_one_page_with_every_group_option_key_and_sweep():
    page = help_page("About.", "config")
    assert len(page.splitlines()) <= 54  # and 6 of examples
    names = [file.stem for group in [*GROUPS, "sweeps"] for file in (CONF / group).glob("*.yaml")]
    words = {word.strip("*,:") for word in page.split()}
    assert {*names, *GROUPS} <= words
    assert {key for key in every_key() if "." not in key} - {*GROUPS} <= {word.partition("=")[0] for word in words}


def test_help_of_a_group_lists_its_options_and_keys():
    page = help_page("About.", "config", ["--help", "optim"])
    assert {key for key in every_key() if key.startswith("optim.")} <= {*page.split()}
    assert "adamw" in page


def test_hydra_raises_if_the_user_asks_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Could not override 'sed'"):
        run(tmp_path, "train.py", "sed=1")


INTERRUPTED_IN_LIGHTNING = SystemExit(1)
INTERRUPTED_IN_LIGHTNING.__context__ = KeyboardInterrupt()


@pytest.mark.parametrize(
    ("end", "code"), [(SystemExit(), 143), (KeyboardInterrupt(), 130), (INTERRUPTED_IN_LIGHTNING, 130)], ids=repr
)
def test_terminated_program_exits_with_143_and_an_interrupted_one_with_130(end, code):
    with pytest.raises(SystemExit) as raised, exit_codes():
        raise end
    assert raised.value.code == code
