"""A slip on the command line is one sentence that says what was meant, before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from simbal.runs.spec import GROUPS

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
HEAVY = {"torch", "lightning", "optuna", "scipy", "polars", "rich"}
A_KEY = {group: next(iter(yaml.safe_load((CONF / group / option).read_text()))) for group, option in {
    "model": "tiny.yaml", "router": "softmax.yaml", "experts": "auto.yaml", "data": "pysource.yaml",
    "optim": "adamw.yaml", "trainer": "default.yaml", "logger": "none.yaml",
}.items()} | {"balancing": "simbal.coef"}  # fmt: skip


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_misspelt_key_in_any_group_is_an_error_that_names_the_right_one(check, group, sign):
    key = f"{group}.{A_KEY[group]}"
    code, _, said = check(f"{sign}{key}x=1")
    assert code == 2
    assert key in said


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["seed=3"], None),
        (["seed=3-3"], ["seed=3"]),
        (["-m", "seed=0-2,7"], ["-m", "seed=0,1,2,7"]),
        (["--multi", "balancing=simbal,lbl", "seed=0-1"], ["--multi", "balancing=simbal,lbl", "seed=0,1"]),
        (["hydra.mode=MULTIRUN", "seed=0-1"], ["hydra.mode=MULTIRUN", "seed=0,1"]),
        (["-m", "sweeps=significance", "balancing.simbal.coef=1", "balancing.lbl.coef=1e-3"], None),
        (["hydra.mode=RUN", "sweeps=significance"], None),
        (["-m", "balancing=lbl,simbal", "balancing.lbl.coef=0.1,0.01"], None),
        (["-m", "balancing=glob(*)", "balancing.lbl.coef=interval(0,1)"], None),
        (["balancing=[lbl,simbal]", "balancing.lbl.coef=1", "balancing.simbal.coef=1"], None),
        (["data.packages={numpy:1.0}", "~data.packages.torch"], None),
        (["+data.packages.attrs=25.4.0"], None),
        (["name='0-4'", "optim.betas=[0.9,0.99]"], None),
        (["+hydra.sweeper.params.seed=0-4", "hydra/launcher=procs"], None),
        (["--shell-completion", "query=bash"], None),
        ([], None),
    ],
)
def test_what_is_meant_reaches_hydra_with_its_spans_written_out(check, arguments, seen):
    assert check(*arguments) == (seen or arguments)


def test_options_and_sweeps_of_another_folder_count(check, tmp_path):
    (tmp_path / "balancing").mkdir()
    (tmp_path / "balancing" / "mine.yaml").write_text("mine:\n  strength: 1e-3\n")
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "two.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: small]\nhydra: {sweeper: {params: {balancing: 'mine,lbl'}}}\n"
    )
    folder = f"--config-dir={tmp_path}"
    arguments = [folder, "-m", "sweeps=two", "balancing.mine.strength=2", "balancing.lbl.coef=1"]
    assert check(*arguments) == arguments
    assert "balancing.mine.strength must be a number" in check(folder, "balancing=mine", "balancing.mine.strength=x")[2]
    assert "balancing has no option mine" in check("balancing=mine")[2]


def test_help_names_every_group_option_and_sweep_in_the_words_of_its_file(check):
    code, page, _ = check("--help", "sed=1")
    assert code == 0
    assert page.startswith("About.")
    for file in [file for group in [*GROUPS, "sweeps"] for file in (CONF / group).glob("*.yaml")]:
        comment = next(line for line in file.read_text().splitlines() if "@package" not in line)
        assert file.stem in page
        assert comment.removeprefix("# ") in page
    assert "* tiny " in page
    assert "Cost: ten runs" in page
    assert "name=default" in page
    assert "--hydra-help" in page


@pytest.mark.parametrize("argument", ["--help", "--cfg=job"])
def test_looking_around_imports_nothing_heavy(argument):
    program = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print('loaded', sorted(set(sys.modules) & {HEAVY!r})))\n"
        f"sys.argv = ['train.py', {argument!r}]\n"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    shown = python("-c", program)
    assert shown.stdout.splitlines()[-1] == "loaded []"
    assert "simbal" in shown.stdout
