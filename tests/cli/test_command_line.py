"""A slip on the command line is one sentence that says what was meant, before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from simbal.cli import command_line
from simbal.runs.spec import GROUPS

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
HEAVY = {"torch", "lightning", "optuna", "scipy", "polars", "rich"}
A_KEY = {group: next(iter(yaml.safe_load((CONF / group / option).read_text()))) for group, option in {
    "model": "tiny.yaml", "router": "softmax.yaml", "experts": "auto.yaml", "data": "pysource.yaml",
    "optim": "adamw.yaml", "trainer": "default.yaml", "logger": "none.yaml",
}.items()} | {"balancing": "simbal.coef"}  # fmt: skip


@pytest.fixture
def check(monkeypatch, capsys):
    """Runs the check on a command line; the arguments Hydra then sees, or the exit code and what stderr said."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            command_line.check(CONF, "About.")
        except SystemExit as end:
            return end.code, capsys.readouterr().err
        return sys.argv[1:]

    return run


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("sed=1", "sed=1: there is no key sed; did you mean seed?"),
        ("steps=5", "did you mean trainer.max_steps?"),
        ("balancing.coef=1", "there is no key balancing.coef; did you mean balancing.simbal.coef?"),
        ("balancing.lbl.coef=1", "balancing.lbl.coef belongs to balancing=lbl, which is not chosen"),
        ("balancing=simball", "balancing has no option simball; did you mean simbal? (there is bias_controller, "),
        ("balancing=[lbl,simball]", "balancing has no option simball; did you mean simbal?"),
        ("balancing=[lbl,lbl]", "balancing=[lbl,lbl] names lbl twice: once is enough"),
        ("balancing=[lf_lbl,lbl]", "balancing=[lf_lbl,lbl] names lbl twice"),
        ("balancing=glob(x*)", "balancing=glob(x*) chooses nothing: balancing has bias_controller, capacity, cosine, "),
        ("balancing=null", "chooses nothing"),
        ("sweeps=null", "chooses nothing"),
        ("balancing=", "chooses nothing"),
        ("balancing@model=lbl", "leave out the @"),
        ("sweeps=signif", "sweeps has no option signif; did you mean significance?"),
        ("modle=tiny", "there is no key modle; did you mean model?"),
        ("hydrra/launcher=basic", "there is no group hydrra/launcher"),
        ("+balancing.simbal.coeff=3", "did you mean balancing.simbal.coef?"),
        ("++x=1", "++x=1 would add a key"),
        ("+data.packages.torch=2.13.0", "would add a key, but every key there is exists already; did you mean data."),
        ("+seed=1", "would add a key, but every key there is exists already; did you mean seed?"),
        ("~sed", "there is no key sed; did you mean seed?"),
        ("~balancing.simbal.coef", "deletes a key that balancing.simbal needs: give it a value"),
        ("balancing.simbal={coef:1,coeff:2}", "there is no key balancing.simbal.coeff; did you mean"),
        ("balancing.simbal.coef=big", "balancing.simbal.coef must be a number, such as 0.1"),
        ("balancing.simbal.coef=true", "balancing.simbal.coef must be a number"),
        ("balancing.simbal.coef=null", "balancing.simbal.coef must be a number"),
        ("balancing.simbal.gram_dtype=3", "balancing.simbal.gram_dtype must be text, such as fp32"),
        ("balancing.simbal._target_=os.abort", "there is no key balancing.simbal._target_"),
        ("seed=4-0", "seed=4-0: the span 4-0 counts down: write 0-4"),
        ("seed=0-4", "seed=0-4 asks for several runs: add -m"),
        ("balancing=simbal,lbl", "balancing=simbal,lbl asks for several runs: add -m"),
        ("sweeps=significance", "sweeps=significance asks for several runs: add -m"),
        ("seed=[", "has a bracket without its other half"),
        ("seed", "seed has no value: write seed=..."),
        ("--config-name=nope", "there is no nope.yaml in"),
    ],
)  # fmt: skip
def test_a_slip_is_one_sentence_and_exit_code_2(check, argument, sentence):
    code, said = check(argument)
    assert code == 2
    assert sentence in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_misspelt_key_in_any_group_is_an_error_that_names_the_right_one(check, group, sign):
    key = f"{group}.{A_KEY[group]}"
    code, said = check(f"{sign}{key}x=1")
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


def test_cfg_and_m_together_are_one_sentence(check):
    code, said = check("-m", "--cfg", "job")
    assert (code, said) == (2, "error: --cfg shows the config of one run: leave out -m\n")


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
    assert "balancing.mine.strength must be a number" in check(folder, "balancing=mine", "balancing.mine.strength=x")[1]
    assert "balancing has no option mine" in check("balancing=mine")[1]


@pytest.mark.parametrize(
    ("sweep", "sentence"),
    [
        ("sed: 1", "sweeps=bad: there is no key sed; did you mean seed?"),
        ("balancing: {simbal: {coeff: 1}}", "there is no key balancing.simbal.coeff; did you mean"),
        ("balancing: {simbal: {coef: big}}", "sweeps=bad: balancing.simbal.coef must be a number"),
        ("hydra: {sweeper: {params: {sed: 1}}}", "sed=1: there is no key sed; did you mean seed?"),
        ("hydra: {sweeper: {params: {seed: 4-0}}}", "seed=4-0: the span 4-0 counts down"),
        ("hydra: {sweeper: {params: {balancing: 'lbl,simball'}}}", "balancing has no option simball"),
        ("defaults: [override /model: huge]", "sweeps=bad: model has no option huge"),
    ],
)  # fmt: skip
def test_a_slip_in_a_named_sweep_is_found_too(check, tmp_path, sweep, sentence):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "bad.yaml").write_text(f"# @package _global_\n{sweep}\n")
    code, said = check(f"--config-dir={tmp_path}", "-m", "sweeps=bad")
    assert code == 2
    assert sentence in said


def test_one_named_sweep_runs_at_a_time(check):
    assert check("-m", "sweeps=significance,null") == (2, "error: sweeps= takes one named sweep at a time\n")


def test_a_yaml_file_that_cannot_be_read_is_named(check, tmp_path):
    (tmp_path / "balancing").mkdir()
    (tmp_path / "balancing" / "broken.yaml").write_text("a: [")
    code, said = check(f"--config-dir={tmp_path}", "balancing=broken")
    assert code == 2
    assert f"{tmp_path / 'balancing' / 'broken.yaml'} is not valid YAML" in said


def test_help_names_every_group_option_and_sweep_in_the_words_of_its_file(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help", "sed=1"])
    with pytest.raises(SystemExit) as end:
        command_line.check(CONF, "What it is about.")
    page = capsys.readouterr().out
    assert end.value.code == 0
    assert page.startswith("What it is about.")
    for file in [file for group in [*GROUPS, "sweeps"] for file in (CONF / group).glob("*.yaml")]:
        comment = next(line for line in file.read_text().splitlines() if "@package" not in line)
        assert file.stem in page
        assert comment.removeprefix("# ") in page
    assert "* tiny " in page
    assert "Cost: ten runs" in page
    assert "name=default" in page
    assert "--hydra-help" in page


@pytest.mark.parametrize(("arguments", "terminal", "said"), [
    (["seed=1"], True, "starting ...\n"), (["seed=1"], False, ""), (["-m", "seed=1,2"], True, ""),
])  # fmt: skip
def test_a_terminal_is_told_at_once_that_something_starts(monkeypatch, capsys, arguments, terminal, said):
    called = []
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr("hydra.main", lambda **_: lambda main: lambda: called.append(capsys.readouterr().err))
    command_line.run(print, "", arguments)
    assert called == [said]


def test_train_py_imports_nothing_heavy():
    program = f"import sys, train; print(sorted(set(sys.modules) & {HEAVY!r}))"
    assert python("-c", program).stdout.strip() == "[]"


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


def test_a_config_that_cannot_run_is_one_sentence_and_exit_code_1():
    refused = python("train.py", "model.top_k=99")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: model.top_k=99 must lie between 1 and model.num_experts=16\n"


def test_report_py_says_which_folder_is_missing(tmp_path):
    refused = python("report.py", str(tmp_path / "nowhere"))
    assert (refused.returncode, refused.stderr) == (1, f"error: there is no folder {tmp_path / 'nowhere'}\n")
