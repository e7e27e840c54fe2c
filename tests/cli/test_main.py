"""The command `simbal` and the scripts of the checkout start the same programs."""

import inspect
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from simbal.cli import main as dispatcher
from tests.conftest import CONF, MARKOV, SMALL

ROOT = CONF.parent
SCRIPTS = {file.stem: file for file in ROOT.glob("*.py")}
HEAVY = {"torch", "lightning", "hydra", "omegaconf", "numpy"}
# imported by us, by our libraries, by Python at the start of a program, and by Python in child processes
HIDING = ("optuna", "torch", "simbal", "hydra_plugins", "pathlib", "multiprocessing", "pickle")
INSTALL_COMPLETION = 'eval "$(simbal -sc install=bash)"'
ASK = """
for line in "$@"; do
    COMP_LINE="$line"; COMP_POINT=${#line}; words=($line); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    hydra_bash_completion
    echo "${COMPREPLY[*]}"
done
"""


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
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.slow  # starts Python anew
def test_folder_with_the_name_of_a_library_is_not_imported_by_a_script_or_its_jobs(tmp_path, cache_dir):
    checkout = tmp_path / "checkout"
    for name in HIDING:
        (checkout / name).mkdir(parents=True)
        (checkout / name / "__init__.py").write_text("raise ImportError('hidden')\n")
    shutil.copy(SCRIPTS["train"], checkout)
    for configs in ("conf", "sweeps"):
        shutil.copytree(ROOT / configs, checkout / configs)
    keys = (*SMALL, *MARKOV, "output_dir=outputs", f"data.cache_dir={cache_dir}", "trainer.val_every=12")
    values = dict(key.split("=", 1) for key in keys)
    words = [f"{key}={value}" for key, value in values.items()]
    command = [sys.executable, "train.py", "-m", "balancing=none,lbl", *words]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert len([*checkout.glob("outputs/default/*/record.json")]) == 2


@pytest.mark.slow  # starts Python anew for each line
def test_bash_completes_options_sweeps_and_keys():
    assert INSTALL_COMPLETION in (ROOT / "docs/guide/installing.md").read_text()
    lines = ["simbal train balancing=si", "simbal train -m sweeps=sig", "simbal train trainer.max"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-c", INSTALL_COMPLETION + ASK, "bash", *lines]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "balancing=simbal balancing=sinkhorn", "sweeps=significance", "trainer.max_steps=",
    ]  # fmt: skip
