"""The programs accept every command in README.md and the guides."""

import re
import shlex

import hydra
import pytest

from tests.composing import compose
from tests.conftest import CONF

ROOT = CONF.parent
FILES = (ROOT / "README.md", ROOT / "docs/tutorial.md", *sorted((ROOT / "docs/guide").glob("*.md")))
_COMMAND = re.compile(
    r"^(?: {4}|\$ )?(?:python|torchrun .*?) (train|evaluate|prepare|export)\.py (.*?)(?:  +#.*)?$", re.M
)
OF_A_READER = ("importance", "my_threshold")  # strategies that the reader of a guide writes
OF_RUNS = ("--", "run=", "from=", "-m from=")  # they need a run; tests/cli/test_resume.py tests these keys
NEEDS_A_CLUSTER = ("hydra/launcher=ray", "hydra.launcher.address", "dry_run")
COMMANDS = {
    (program, line)
    for file in FILES
    for program, line in _COMMAND.findall(file.read_text(encoding="utf-8"))
    if not line.startswith(OF_RUNS if program == "train" else "--") and not any(name in line for name in OF_A_READER)
}
TRAIN = sorted(line for program, line in COMMANDS if program == "train")
OTHERS = sorted(command for command in COMMANDS if command[0] != "train")


def test_pages_show_commands():
    assert len(TRAIN) > 10
    assert len(OTHERS) > 5


@pytest.mark.parametrize(("program", "line"), OTHERS)
def test_command_of_a_page_composes(program, line):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        hydra.compose(program, [word for word in shlex.split(line) if word != "&"])


@pytest.mark.parametrize("line", TRAIN)
def test_train_command_of_a_page_is_accepted(line):
    assert compose([word for word in shlex.split(line) if not word.startswith(NEEDS_A_CLUSTER)])
