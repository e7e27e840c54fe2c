"""What lies beside a program is no library of it, whatever it is called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MARKOV, SMALL

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = ("train", "prepare", "evaluate", "report", "export")
# imported by us, by what we import, by Python for a program, and by Python for the children of one
NAMES = ("optuna", "hydra", "torch", "simbal", "hydra_plugins", "pathlib", "argparse", "multiprocessing", "pickle")


@pytest.fixture
def checkout(tmp_path):
    """A folder with the programs and their configs, in which somebody has unpacked packages."""
    folder = tmp_path / "checkout"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"open({str(tmp_path)!r} + '/executed-' + __name__, 'w')\nraise ImportError('hostile')\n"
        )
    for program in PROGRAMS:
        shutil.copy(REPOSITORY / f"{program}.py", folder)
    for configs in ("conf", "sweeps"):
        shutil.copytree(REPOSITORY / configs, folder / configs)
    return folder


def run(program, cwd, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_folder_named_like_a_library_is_not_imported_by_a_program_beside_it(checkout, tmp_path, program):
    (tmp_path / "link").symlink_to(checkout)
    for path, cwd in ((f"{program}.py", checkout), (tmp_path / "link" / f"{program}.py", tmp_path)):
        done = run(path, cwd, "--help")
        assert done.returncode == 0, done.stderr
    assert not [*tmp_path.glob("executed-*")]


@pytest.mark.slow
def test_nor_by_the_jobs_of_a_sweep_and_their_fork_server(checkout, tmp_path, cache_dir):
    places = ("output_dir=outputs", f"data.cache_dir={cache_dir}", "trainer.max_steps=2", "trainer.val_every=2")
    keys = dict(override.split("=", 1) for override in (*SMALL, *MARKOV, *places))
    done = run("train.py", checkout, "-m", "balancing=none,lbl", *(f"{key}={value}" for key, value in keys.items()))
    assert done.returncode == 0, done.stderr + done.stdout
    assert len([*(checkout / "outputs").rglob("record.json")]) == 2
    assert not [*tmp_path.glob("executed-*")]
