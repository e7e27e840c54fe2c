"""What README.md and the guides tell a reader to type is what the programs take."""

import re
import shlex

import hydra
import pytest

from tests.composing import compose
from tests.conftest import CONF

ROOT = CONF.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs/guide").glob("*.md"))
_COMMAND = re.compile(
    r"^(?: {4}|\$ )?(?:python|torchrun .*?) (train|evaluate|prepare|export)\.py (.*?)(?:  +#.*)?$", re.M
)
WRITTEN = ("importance", "my_threshold")  # strategies that a reader has written, by the guides
OF_RUNS = ("--", "run=", "from=", "-m from=")  # of none, or of one that is there: tested with the command line
COMMANDS = [
    (file.name, program, line)
    for file in (README, ROOT / "docs/tutorial.md", *GUIDES)
    for program, line in _COMMAND.findall(file.read_text(encoding="utf-8"))
    if not line.startswith(OF_RUNS if program == "train" else "--")
]
TRAININGS = [
    (file, line) for file, program, line in COMMANDS if program == "train" and not any(name in line for name in WRITTEN)
]


def test_the_pages_show_commands():
    assert len(COMMANDS) >= 40
    assert {"tutorial.md", "running.md", "search.md", "scaling.md", "text.md"} <= {file for file, _, _ in COMMANDS}


@pytest.mark.parametrize(("file", "program", "line"), [case for case in COMMANDS if case[1] != "train"])
def test_every_command_that_a_page_shows_is_one_that_the_programs_take(file, program, line):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        hydra.compose(program, [word for word in shlex.split(line) if word != "&"])


@pytest.mark.parametrize(("file", "line"), TRAININGS)
def test_what_a_page_shows_to_train_with_is_of_runs_that_can_be(file, line):
    there = ("hydra/launcher=ray", "hydra.launcher.address", "dry_run")  # a cluster is not
    assert compose([word for word in shlex.split(line) if not word.startswith(there)])
