"""Every table and figure of the paper has a command that composes."""

import re
import shlex

import hydra
import pytest

from tests.composing import compose
from tests.conftest import CONF

LINE = re.compile(r"^\| (Table|Figure) (\d+) \| .* \| `python (train|evaluate)\.py (.*)` \|$", re.M)
COMMANDS = LINE.findall((CONF.parent / "docs/guide/paper.md").read_text(encoding="utf-8"))


def test_every_table_and_figure_has_a_command():
    tables, figures = ([("Table", number) for number in range(1, 11)], [("Figure", number) for number in range(1, 7)])
    assert [(kind, int(number)) for kind, number, _, _ in COMMANDS] == tables + figures


@pytest.mark.parametrize(("program", "line"), {(program, line): None for _, _, program, line in COMMANDS})
def test_every_command_composes(program, line):
    if program == "train":
        assert compose(shlex.split(line))
    else:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            hydra.compose(program, shlex.split(line))
