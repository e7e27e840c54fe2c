"""A config that was read from a folder names strategies of simbal or registered ones, and imports nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simbal.analysis.trained import load
from simbal.balancing.composition import build_strategy
from simbal.balancing.weight_losses import SimBal
from simbal.errors import UserError
from simbal.training.run import train
from tests.conftest import spec_of
from tests.forged_runs import forge

REPOSITORY = Path(__file__).parents[2]
FACTS = {"num_layers": 2, "num_experts": 4, "seed": 0}
HOSTILE = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"
STRATEGY = "from simbal.balancing.weight_losses import SimBal as Ours\nclass SimBal(Ours): pass\n"
ENTRY = "[simbal.strategies]\nmine = paper_runs:SimBal\n"
REFUSED = "is not imported: the config.yaml of a run may name a strategy of simbal, or one that an installed package"


def package(folder, entry_points=None):
    """A package in `folder` that leaves the file `executed` behind; with entry points it is an installed one."""
    (folder / "paper_runs").mkdir(parents=True)
    (folder / "paper_runs" / "__init__.py").write_text(HOSTILE + STRATEGY)
    if entry_points is not None:
        about = folder / "paper_runs-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paper-runs\nVersion: 1\n")
        (about / "entry_points.txt").write_text(entry_points)
    return folder / "paper_runs" / "executed"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, cache_dir):
    """The folder of a finished run, whose config.yaml names the class of a package; no test changes it."""
    spec = spec_of(tmp_path_factory.mktemp("outputs"), cache_dir, "balancing=simbal")
    train(spec)
    forge(spec.path, "balancing.simbal._target_", "paper_runs.SimBal")
    return spec.path


@pytest.fixture
def installed(monkeypatch):
    """`installed(folder)`: this process finds what lies there, as if installed."""
    yield monkeypatch.syspath_prepend
    sys.modules.pop("paper_runs", None)


OTHERS_ENTRIES = ["[simbal.strategies]\nmine = paper_runs:Other\n", "[other.group]\nmine = paper_runs:SimBal\n"]


@pytest.mark.parametrize("entry_points", [None, *OTHERS_ENTRIES])
def test_a_class_that_no_installed_package_has_registered_is_never_imported(hostile, installed, tmp_path, entry_points):
    mark = package(tmp_path / "installed", entry_points)
    installed(tmp_path / "installed")
    with pytest.raises(UserError, match=f"balancing.simbal: _target_=paper_runs.SimBal {REFUSED}"):
        load(hostile, "cpu")
    assert not mark.exists()


def test_a_class_that_an_installed_package_has_registered_is_built(hostile, installed, tmp_path):
    mark = package(tmp_path, ENTRY)
    installed(tmp_path)
    loaded = load(hostile, "cpu").module.balancing.parts["simbal"]
    assert type(loaded).__module__ == "paper_runs"
    assert mark.exists()


def program(name, cwd, *arguments, **environment):
    command = [sys.executable, str(REPOSITORY / name), *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [("evaluate.py", ("analysis=quality",)), ("export.py", ("to=model",))],
)
def test_no_program_imports_a_package_beside_the_run(hostile, tmp_path, name, keys):
    here, there = tmp_path / "here", tmp_path / "there"
    marks = [package(here, ENTRY), package(there)]
    done = program(name, here, f"run={hostile}", *keys, PYTHONPATH=str(there))
    assert done.returncode == 1
    assert f"balancing.simbal: _target_=paper_runs.SimBal {REFUSED}" in done.stderr
    assert "entry point of the group simbal.strategies" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(mark.exists() for mark in marks)


@pytest.mark.slow
def test_a_program_builds_a_class_that_an_installed_package_has_registered(hostile, tmp_path):
    mark = package(tmp_path / "installed", ENTRY)
    done = program("export.py", tmp_path, f"run={hostile}", "to=model", PYTHONPATH=str(tmp_path / "installed"))
    assert done.returncode == 0, done.stderr
    assert mark.exists()


@pytest.mark.parametrize(
    "target",
    ["os.system", "os.abort", "builtins.exec", "subprocess.Popen", "..simbal.balancing.weight_losses.SimBal", ".SimBal",
     "", None, 5, "simbal.SimBal", "simbal/balancing/weight_losses.SimBal", "a b.c", "tests.balancing.broken.Leaky",
     "hydra_plugins.simbal_plugins.grid.GridSweeper"],
)  # fmt: skip
def test_a_folders_config_names_no_other_thing(target):
    with pytest.raises(UserError, match="balancing.x: _target_=.* is not imported: "):
        build_strategy("x", {"_target_": target}, FACTS, trusted=False)


@pytest.mark.parametrize(
    "target",
    ["simbal.balancing.composition.build_strategy", "simbal.balancing.base.Properties",
     "simbal.balancing.weight_losses.Nothing", "simbal.training.run.train", "simbal.sweep.worker.work",
     "simbal.balancing.SimBall", "simbal.nowhere.SimBal", "simbal.balancing.weight_losses.SimBal.__init__"],
)  # fmt: skip
def test_what_is_no_strategy_of_simbal_is_not_called(target):
    with pytest.raises(UserError, match="names no subclass of simbal.balancing.base.Balancing"):
        build_strategy("x", {"_target_": target, "spec": None}, FACTS, trusted=False)


def test_strategies_of_simbal_are_built_from_a_folders_config_and_any_from_the_users_own(tmp_path, installed):
    keys = {"_target_": "simbal.balancing.weight_losses.SimBal", "coef": 0.1}
    assert type(build_strategy("x", keys, FACTS, trusted=False)) is SimBal
    mark = package(tmp_path)
    installed(tmp_path)
    built = build_strategy("x", keys | {"_target_": "paper_runs.SimBal"}, FACTS)
    assert isinstance(built, SimBal)
    assert mark.exists()
