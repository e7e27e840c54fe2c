"""The wheel contains everything that the programs need in a user's project."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import MARKOV, SMALL

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
SHORT = (*SMALL, *MARKOV, "trainer.max_steps=2", "trainer.val_every=2", "optim.warmup_steps=1")
KEYS = [f"{key}={value}" for key, value in dict(line.split("=", 1) for line in SHORT).items()]
# an audit hook records every file of the checkout that a program opens
WATCH = """
import sys
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith({places!r}):
        with open({found!r}, "a") as found:
            found.write(str(arguments[0]) + "\\n")
sys.addaudithook(watch)
"""

pytestmark = pytest.mark.slow  # builds, installs and starts programs


def run(*command, cwd):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SIMBAL"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, check=False)


def succeeded(*command, cwd):
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment with the wheel and the libraries of this one."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("environment")
    for name in ("src", "conf", "sweeps"):  # a copy, as a build leaves files behind
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    succeeded(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", source / "dist", source, cwd=source)
    [wheel] = (source / "dist").glob("simbal-*.whl")
    succeeded(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python, (packages,) = folder / "bin/python", folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    install = ("install", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", wheel)
    succeeded(*PIP, "--python", python, *install, cwd=folder)
    places = tuple(f"{ROOT / name}" for name in ("src/", "conf/", "sweeps/", "train.py", "report.py"))
    (packages / "sitecustomize.py").write_text(WATCH.format(places=places, found=str(folder / "opened")))
    return folder


@pytest.fixture(scope="module")
def project(environment, tmp_path_factory):
    """The folder of a new project; its package is on the path of the environment, as `pip install -e` puts it."""
    folder = tmp_path_factory.mktemp("projects") / "myproject"
    succeeded(environment / "bin/simbal", "new", folder.name, cwd=folder.parent)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "myproject.pth").write_text(str(folder))
    info = packages / "myproject-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: myproject\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[simbal.strategies]\nmine = myproject.balancing:Mine\n")
    return folder


def test_wheel_has_every_tracked_file(environment):
    [packages] = environment.glob("lib/python*/site-packages")
    tracked = succeeded("git", "ls-files", "src", "conf", "sweeps", cwd=ROOT).split()
    assert len(tracked) > 250
    for name in tracked:
        place = name.replace("sweeps/", "conf/sweeps/") if name.startswith("sweeps/") else name
        installed = packages / (place.removeprefix("src/") if name.startswith("src/") else f"simbal/{place}")
        assert installed.is_dir() if (ROOT / name).is_symlink() else installed.is_file(), name


def test_programs_run_in_a_project_and_open_no_file_of_the_checkout(environment, project):
    simbal = environment / "bin/simbal"
    table = succeeded(simbal, "train", "-m", "sweeps=mine", "seed=0", *KEYS, cwd=project)
    assert "2 new" in table
    runs = {folder.name.partition("-")[0]: folder for folder in project.glob("outputs/mine/*/")}
    assert runs.keys() == {"mine", "lbl"}
    assert "mine" in succeeded(simbal, "report", "outputs/mine", cwd=project)
    # evaluate and run= load the class of the project, which is registered by its entry point
    succeeded(simbal, "evaluate", f"run={runs['mine']}", "analysis=quality", cwd=project)
    assert (runs["mine"] / "analysis/quality.json").is_file()
    succeeded(simbal, "train", f"run={runs['mine']}", cwd=project)
    refused = run(simbal, "train", "balancing=mime", cwd=project)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "did you mean mine?" in refused.stderr
    assert not (environment / "opened").exists(), (environment / "opened").read_text()


def test_the_hook_sees_a_file_of_the_checkout(environment, project):
    where = "import simbal, hydra_plugins.simbal_plugins.grid as grid; print(simbal.__file__, grid.__file__)"
    code = f"open({str(ROOT / 'conf/config.yaml')!r}); {where}"
    for file in succeeded(environment / "bin/python", "-c", code, cwd=project).split():
        assert Path(file).is_relative_to(environment)
    assert (environment / "opened").read_text() == f"{ROOT / 'conf/config.yaml'}\n"
    (environment / "opened").unlink()
