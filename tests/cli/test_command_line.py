"""What Hydra is given for a command line, the page of `--help`, and what is imported for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from simbal.config.schema import GROUPS, every_key
from simbal.errors import ConfigError
from tests.composing import compose, refusal
from tests.conftest import CONF
from tests.in_process import run

REPOSITORY = Path(__file__).parents[2]
HEAVY = {"torch", "lightning", "optuna", "scipy", "polars", "rich"}
A_KEY = {group: next(iter(yaml.safe_load((CONF / group / option).read_text()))) for group, option in {
    "model": "tiny.yaml", "router": "softmax.yaml", "experts": "auto.yaml", "data": "pysource.yaml",
    "optim": "adamw.yaml", "trainer": "default.yaml", "logger": "none.yaml",
}.items()} | {"balancing": "simbal.coef"}  # fmt: skip


def python(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    environment = os.environ | environment
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_a_misspelt_key_in_any_group_is_an_error_that_names_the_right_one(group, sign, flags):
    key = f"{group}.{A_KEY[group]}"
    code, said = refusal("train.py", [*flags, f"{sign}{key}x=1"])
    assert code == 2, said
    assert f"{key}x" in said
    assert f"{key}?" in said


@pytest.mark.parametrize(
    ("arguments", "seen"),
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
        ([], None),
    ],
)
def test_hydra_gets_the_arguments_with_spans_expanded(check, arguments, seen):
    assert check(*arguments) == (seen or arguments)


def test_a_named_sweep_that_inherits_a_search_is_a_search(check, tmp_path, monkeypatch):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/mine.yaml").write_text("# @package _global_\ndefaults: [coefficient_search]\n")
    monkeypatch.chdir(tmp_path)
    assert check("-m", "sweeps=mine")[-1] == "hydra/sweeper=optuna"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "balancing=simbal,lbl", "balancing.lbl.coef=0.1"],  # Hydra sets it before it calls the sweeper
        ["-m", "balancing=simbal,lbl", "balancing.simbal.coef=1,2", "balancing.lbl.coef=0.1"],
    ],
)
def test_a_key_of_one_swept_option_is_set_where_it_belongs(arguments):
    for facts in compose(["data=synthetic", *arguments]):
        coefficient = facts["flat"].get("balancing.lbl.coef")
        assert coefficient == (0.1 if facts["choices"]["balancing"] == "lbl" else None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seed", "1"], "seed="),
        (["--learning-rate=1"], "--learning-rate"),
        (["lbl"], "balancing=lbl"),
        (["-m", "balancing=simbal,", "lbl"], "balancing=simbal,"),
        (["-m", "balancing=[simbal,lbl"], "balancing=[simbal,lbl"),
        (["balancing=[simbal,lbll]"], "lbl"),
        (["balancing=lbl;simbal"], "balancing"),
        (["optim=null"], "optim"),
        (["~optim.lr"], "optim.lr"),
        (["+model.top_k=2"], "model.top_k"),
        (["optim.lr=${optim.x}"], "optim.x"),
        (["output_dir=${oc.env:NOT_THERE}"], "NOT_THERE"),
        (["optim.betas=[0,2]"], "optim.betas[1]"),
        (["data=files"], "data.files"),
        (["data.files=x"], "data=files"),
        (["logger.kind=tensorbord"], "tensorboard"),
        (["seed=true"], "seed=true"),
        (["+balancing.mine._target_=os.system"], "os.system"),
        (["-m", "seed=0-1", "--cfg", "job"], "--"),
        (["sweeps=significance"], "-m"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, named):
    code, said = refusal("train.py", arguments)
    assert code in ((1, 2) if "os.system" in named else (2,)), said
    assert said.startswith("error: ")
    assert "\n" not in said
    assert named in said


@pytest.mark.parametrize(
    ("text", "named"), [("num_layers: [1\n", "mine.yaml, line 2"), ("defaults: [tiny]\nrate: 1\n", "model.rate")]
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, named):
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text(text)
    done = run(tmp_path, "train.py", "model=mine")
    assert done.returncode == 2
    assert named in done.stderr


@pytest.mark.parametrize("file", ["conf/model/tiny.yaml", "conf/config.yaml", "sweeps/significance.yaml"])
def test_a_file_that_would_never_be_read_is_refused(check, tmp_path, monkeypatch, file):
    original = CONF.parent / file
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(original.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert check("seed=1") == ["seed=1"]
    (tmp_path / file).write_text("num_layers: 7\n")
    with pytest.raises(ConfigError, match=f"^{file} is never read"):
        check("seed=1")


def test_help_is_one_page_that_names_every_group_option_key_and_sweep():
    page = python("train.py", "--help", "sed=1").stdout
    assert len(page.splitlines()) <= 60
    names = [file.stem for group in [*GROUPS, "sweeps"] for file in (CONF / group).glob("*.yaml")]
    words = {word.strip("*,:") for word in page.split()}
    assert {*names, *GROUPS} <= words
    assert {key for key in every_key() if "." not in key} - {*GROUPS} <= {word.partition("=")[0] for word in words}


def test_help_of_a_group_lists_its_options_and_keys():
    page = python("train.py", "--help", "optim").stdout
    assert {key for key in every_key() if key.startswith("optim.")} <= {*page.split()}
    assert "adamw" in page


def test_hydra_raises_if_the_user_asks_for_it():
    done = python("train.py", "sed=1", HYDRA_FULL_ERROR="1")
    assert "Traceback" in done.stderr
    assert "ConfigCompositionException" in done.stderr


@pytest.mark.parametrize("argument", ["--help", "--cfg=job", "sed=1"])
def test_looking_around_imports_nothing_heavy(argument):
    program = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print('loaded', sorted(set(sys.modules) & {HEAVY!r})))\n"
        f"sys.argv = ['train.py', {argument!r}]\n"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    assert python("-c", program).stdout.splitlines()[-1] == "loaded []"
