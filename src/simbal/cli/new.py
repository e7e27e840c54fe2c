"""Write a project of one's own: a strategy, its config, its test, a sweep; and no line that is simbal's.

Examples:
    simbal new myproject            # the folder myproject, with the package myproject in it
    simbal new papers/myproject
"""

import keyword
import re
import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

from simbal.errors import UserError, exit_on_user_error

FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["simbal"]  # install it first

[project.optional-dependencies]
test = ["pytest>=8.3"]

[project.entry-points."simbal.strategies"]  # classes that the config of a run's folder may name
mine = "NAME.balancing:Mine"

[tool.setuptools]
packages = ["NAME"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
""",
    "NAME/__init__.py": '"""Experiments with balancing strategies of my own."""\n',
    "NAME/balancing.py": '''\
"""The strategy `mine`: to begin with the importance loss, equal probability for all experts."""

from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.model.router import Routing


class Mine(Balancing):
    """loss = coef * (E sum_i P_i^2 - 1), where P_i is the mean probability of expert i over a micro-batch."""

    formula = "coef * (E sum_i P_i^2 - 1)"
    citation = "arXiv 1701.06538, equation 7"
    properties = Properties(differentiable=True, scope="micro", causal=True, revives_dead_experts=True)

    def __init__(self, coef: float = 0.01) -> None:
        super().__init__()
        self.coef = coef

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of one layer."""
        p_E = routing.distribution_NE.mean(0)
        return self.coef * (len(p_E) * p_E.square().sum() - 1)
''',
    "conf/balancing/mine.yaml": """\
# a strategy of my own
mine:
  _target_: NAME.balancing.Mine
  coef: 0.01
  schedule: null
""",
    "sweeps/mine.yaml": """\
# @package _global_
# Is my strategy's perplexity lower than that of the load balancing loss, beyond the noise of the seed?
# Cost: six runs.
name: mine
baseline: lbl
hydra:
  sweeper:
    params:
      balancing: mine,lbl
      seed: 0-2
""",
    "tests/test_mine.py": '''\
"""The strategy keeps what it declares, and its loss is the formula's."""

from pathlib import Path

import pytest
import torch

from NAME.balancing import Mine
from simbal.conformance import CHECKS, E, cases_of_file, losses, route

CASES = cases_of_file(Path(__file__).parents[1] / "conf/balancing/mine.yaml")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_keeps_what_it_declares(case, check):
    check(case)


@pytest.mark.parametrize(("logit", "value"), [(0.0, 0.0), (50.0, 0.01 * (E - 1))], ids=["uniform", "collapsed"])
def test_its_loss_is_worked_out_by_hand(logit, value):
    x_ND = torch.full((24, 1), logit)  # every token has the logits (logit, 0, ..., 0)
    routing = route(x_ND, torch.eye(E)[:, :1], CASES[0], Mine())
    assert losses(Mine(), [routing]).item() == pytest.approx(value, abs=1e-6)
''',
    "README.md": """\
# NAME

    pip install -e '.[test]'                   # once, in the environment of simbal
    pytest                                     # does the strategy keep what it declares?
    simbal train balancing=mine                # one run
    simbal train -m sweeps=mine                # six runs, and the table that compares them

The strategy is `NAME/balancing.py`, its numbers are `conf/balancing/mine.yaml`. Give these commands in this folder.
""",
    ".gitignore": "outputs/\n.cache/\n__pycache__/\n*.egg-info/\n",
}


def main(argv: list[str]) -> None:
    """Write the project that a command line names."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the new folder, whose name is that of the package")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        write(args.folder)
        print(f"written: {args.folder}, whose README.md says how to go on")


def write(folder: Path) -> None:
    """Write the project as a whole, or nothing.

    Raises:
        UserError: the folder is there, its name is none of a package or that of another one, or the disk refuses.
    """
    name = folder.absolute().name
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name} is no name of a package: take small letters, digits and _, such as myproject")
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise UserError(f"{name} is the name of a package that is installed already: take another one")
    part = folder.with_name(f".{name}.part")
    try:
        if folder.exists() or folder.is_symlink():
            raise UserError(f"{folder} is there already, and nothing of it was changed: take another name")
        part.mkdir(parents=True)
        for file, text in FILES.items():
            path = part / file.replace("NAME", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("NAME", name), encoding="utf-8")
        part.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
