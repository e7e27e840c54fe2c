"""The command `simbal` and the scripts of the checkout start the same programs."""

import inspect
import os
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from simbal.cli import main as dispatcher
from tests.conftest import CONF

ROOT = CONF.parent
SCRIPTS = {file.stem: file for file in ROOT.glob("*.py")}


@pytest.fixture
def simbal(monkeypatch, capsys):
    """Runs the command in this process; returns its exit code, stdout and stderr."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/simbal", *arguments])
        try:
            dispatcher.main()
        except SystemExit as end:
            return end.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_every_script_of_the_checkout_starts_the_subcommand_of_its_name():
    assert {*SCRIPTS} <= {*dispatcher.PROGRAMS}
    texts = {file.read_text().partition('"""\n')[2].replace(f'"{name}"', "NAME") for name, file in SCRIPTS.items()}
    assert len(texts) == 1
    assert "run_program(NAME, sys.argv[1:])" in texts.pop()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_subcommands(simbal, arguments):
    code, out, _ = simbal(*arguments)
    assert code == (0 if arguments else 2)
    for name, program in dispatcher.PROGRAMS.items():
        assert f"simbal {name} " in out
        assert program.summary in out
        module, _, function = program.function.partition(":")
        assert inspect.getdoc(getattr(import_module(module), function))


def test_errors_name_the_command_as_it_was_typed(simbal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simbal("train", "sed=1") == (2, "", "error: there is no key sed; did you mean seed?\n")
    assert simbal("prepare", "-m")[::2] == (2, "error: simbal prepare takes one config at a time: leave out -m\n")
    assert simbal("report", "nowhere")[0] == 1
    code, _, message = simbal("trian", "seed=1")
    assert code == 2
    assert "did you mean train?" in message


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("simbal train balancing=si", "balancing=simbal\nbalancing=sinkhorn"),
        ("simbal train -m sweeps=sig", "sweeps=significance"),
        ("simbal train trainer.max", "trainer.max_steps="),
    ],
)
def test_bash_completes_options_sweeps_and_keys(simbal, monkeypatch, line, completed):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert simbal("-sc", "query=bash")[1].split() == completed.split()


@pytest.mark.slow  # starts Python anew
@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        ([], ("torch", "hydra", "numpy", "pydantic")),
        (["train", "--help"], ("torch", "hydra", "numpy")),
        (["train", "--cfg=job"], ("torch", "optuna", "scipy", "rich")),
        (["train", "sed=1"], ("torch", "optuna", "scipy", "rich")),
        (["prepare", "data=synthetic", "data.vocab_size=64", "data.documents=2"], ("torch",)),
    ],
)
def test_programs_import_nothing_heavy_that_they_do_not_need(arguments, unused, tmp_path):
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('loaded', sorted(set(sys.modules) & set({unused!r}))))\n"
        f"sys.argv = ['simbal', *{arguments!r}]\n"
        "from simbal.cli.main import main\n"
        "main()"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.slow  # starts Python anew
def test_script_does_not_import_its_neighbours(tmp_path):
    shutil.copy(SCRIPTS["evaluate"], tmp_path)
    for name in ("evaluate", "argparse", "yaml", "simbal"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a neighbour of the script')\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "evaluate.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
