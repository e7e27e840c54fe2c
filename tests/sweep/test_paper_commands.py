"""Every table and figure of the paper has a command, and each command composes."""

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir

from tests.conftest import CONF

LINE = re.compile(r"^\| (Table|Figure) (\d+) \| .* \| `python (train|evaluate)\.py (.*)` \|$", re.M)
COMMANDS = LINE.findall((CONF.parent / "docs/guide/paper.md").read_text(encoding="utf-8"))


def test_each_table_and_figure_has_one():
    assert [(kind, int(number)) for kind, number, _, _ in COMMANDS] == [
        *(("Table", number) for number in range(1, 11)),
        *(("Figure", number) for number in range(1, 7)),
    ]


@pytest.mark.parametrize(("kind", "number", "program", "line"), COMMANDS)
def test_it_composes(kind, number, program, line, app):
    if program == "train":
        done = app.run(*shlex.split(line), "dry_run=true")
        assert done.returncode == 0, done.stderr
        assert app.started == []
    else:  # reads trained runs, so that only its keys are checked
        with initialize_config_dir(str(CONF), version_base="1.3"):
            compose(program, shlex.split(line))
