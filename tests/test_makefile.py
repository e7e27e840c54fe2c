"""What is given to `make` as a value is text: neither make nor the shell finds a command in it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MAKES_OWN = {"ARGS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}  # of the `make` that runs the tests
WITH_VALUE = [
    ("dashboard", "NAME", "--logdir outputs/{}"),
    ("chaos", "SECONDS", "-m tests.chaos.campaign --seconds {}"),
    ("study", "STUDY", "-m results.tools.study {}"),
]


@pytest.fixture
def project(tmp_path):
    """The Makefile, and programs that print what they are given."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for file in ("pyproject.toml", "constraints.txt", ".venv/.up-to-date"):
        (tmp_path / file).touch()
    for name in ("python", "tensorboard"):
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\n" "$*" > given\n')
        (programs / name).chmod(0o755)
    return tmp_path


def given(project, *arguments, **environment):
    """What the program of a target was given."""
    (project / "given").unlink(missing_ok=True)
    ours = {name: value for name, value in os.environ.items() if name not in MAKES_OWN}
    subprocess.run(
        ["make", "--silent", *arguments], cwd=project, env=ours | environment, check=True, capture_output=True
    )
    return (project / "given").read_text().removesuffix("\n")


@pytest.mark.parametrize(("target", "variable", "command"), WITH_VALUE)
@pytest.mark.parametrize(
    "value",
    ["7", "two words", "$(touch pwned)", "$(shell touch pwned)", "$$(touch pwned)", "`touch pwned`", ";touch pwned",
     "'; touch pwned; '", '"; touch pwned; "', "a|touch pwned #", "${HOME}"],
)  # fmt: skip
def test_a_value_reaches_the_program_as_it_is(project, target, variable, command, value):
    assert given(project, target, f"{variable}={value}") == command.format(value).strip()
    assert given(project, target, **{variable: value}) == command.format(value).strip()
    assert not (project / "pwned").exists()


def test_without_values_there_are_defaults(project):
    assert given(project, "dashboard") == "--logdir outputs/default"
    assert given(project, "chaos") == "-m tests.chaos.campaign --seconds 600"


def test_args_are_read_by_the_shell(project):
    assert given(project, "sweep", "ARGS=seed=0-4 'name=a b'").endswith(" seed=0,1 seed=0-4 name=a b")
