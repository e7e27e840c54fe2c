"""A command means today what it meant when it was pinned: the same runs, in the same folders, with the same configs."""

from pathlib import Path

import pytest

from tests.golden import pins

CONF = Path(__file__).parents[2] / "conf"
PINNED = pins.read(pins.COMMANDS)
COMMANDS = PINNED["commands"]


def test_train_py_without_arguments_is_the_run_that_it_was():
    assert pins.default() == PINNED["default"]


@pytest.mark.parametrize("entry", COMMANDS, ids=[entry["arguments"] for entry in COMMANDS])
def test_a_command_is_the_runs_that_it_was(entry):
    assert pins.question(entry) | pins.command(entry) == entry


@pytest.mark.parametrize("group", [*PINNED["default"]["choices"]])
def test_every_option_is_chosen_by_some_command(group):
    words = " ".join(entry["arguments"] for entry in COMMANDS).replace("'", "")
    chosen = [word.partition("=")[2].strip("[]").split(",") for word in words.split() if word.startswith(f"{group}=")]
    options = {file.stem for file in (CONF / group).glob("*.yaml")}
    assert options <= {option for one in chosen for option in one}


def test_every_named_sweep_is_pinned():
    assert {f"-m sweeps={file.stem}" for file in (CONF / "sweeps").glob("*.yaml")} <= {e["arguments"] for e in COMMANDS}
