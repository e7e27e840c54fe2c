"""The command `simbal` is the programs of the checkout under other names."""

import os
import subprocess
import sys

import pytest

from simbal.cli import main as dispatcher
from tests.conftest import CONF

ROOT = CONF.parent
SCRIPTS = {file.stem: file for file in ROOT.glob("*.py")}
HEAVY = {"torch", "lightning", "hydra", "omegaconf", "numpy"}


@pytest.fixture
def simbal(monkeypatch, capsys):
    """Runs the command in this process; its exit code and what it printed."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/simbal", *arguments])
        try:
            dispatcher.main()
        except SystemExit as end:
            return end.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def python(*arguments, cwd=ROOT):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_every_script_of_the_checkout_is_a_subcommand_and_holds_nothing_else():
    assert {*SCRIPTS} <= {*dispatcher.PROGRAMS}
    texts = {
        file.read_text().partition('"""\n')[2].replace(f"cli.{name} ", "cli.NAME ") for name, file in SCRIPTS.items()
    }
    assert len(texts) == 1
    assert "from simbal.cli.NAME import main" in texts.pop()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_it_says_what_there_is(simbal, arguments):
    code, out, _ = simbal(*arguments)
    assert code == (0 if arguments else 2)
    for name, program in dispatcher.PROGRAMS.items():
        assert f"simbal {name} " in out
        assert program.about in out


def test_a_folder_beside_the_command_is_no_library(simbal, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/somewhere/bin", *sys.path])
    simbal("--help")
    assert "/somewhere/bin" not in sys.path
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_refusals_and_exit_codes_are_those_of_the_scripts(simbal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simbal("train", "sed=1") == (2, "", "error: there is no key sed; did you mean seed?\n")
    assert simbal("prepare", "-m")[::2] == (2, "error: simbal prepare takes one config at a time: leave out -m\n")
    assert simbal("report", "nowhere") == (1, "", "error: there is no folder nowhere\n")


@pytest.mark.slow  # starts Python anew
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_imports_neither_torch_nor_hydra(arguments, tmp_path):
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('loaded', sorted(set(sys.modules) & {HEAVY!r})))\n"
        f"sys.argv = ['simbal', *{arguments!r}]\n"
        "from simbal.cli.main import main\n"
        "main()"
    )
    assert python("-P", "-c", program, cwd=tmp_path).stdout.splitlines()[-1] == "loaded []"
