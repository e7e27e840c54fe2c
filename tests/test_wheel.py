"""What a wheel installs is all that the programs need, in a folder with nothing but its user's own project."""

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
SHORT = (*SMALL, *MARKOV, "trainer.max_steps=4", "trainer.val_every=2")
KEYS = [f"{key}={value}" for key, value in dict(line.split("=", 1) for line in SHORT).items()]
WATCH = """
import sys
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith({places!r}):
        with open({found!r}, "a") as found:
            found.write(str(arguments[0]) + "\\n")
sys.addaudithook(watch)
"""

pytestmark = pytest.mark.slow  # builds, installs and starts programs


def run(*command, cwd, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SIMBAL"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False)


def succeeded(*command, cwd):
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as a build leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("src", "conf", "sweeps"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    succeeded(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", source / "dist", source, cwd=source)
    [file] = (source / "dist").glob("simbal-*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment: the wheel, and of the one that runs this the libraries alone; what it opens is watched."""
    folder = tmp_path_factory.mktemp("environment")
    succeeded(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python, (packages,) = folder / "bin/python", folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    succeeded(*PIP, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=folder)
    places = tuple(f"{ROOT / name}" for name in ("src/", "conf/", "sweeps/", "train.py", "report.py"))
    (packages / "sitecustomize.py").write_text(WATCH.format(places=places, found=str(folder / "opened")))
    return folder


@pytest.fixture(scope="module")
def project(environment, tmp_path_factory):
    """A new project, installed beside simbal; one stands in it."""
    folder = tmp_path_factory.mktemp("projects")
    succeeded(environment / "bin/simbal", "new", "myproject", cwd=folder)
    install = ("install", "--no-deps", "--no-index", "--no-build-isolation", "-e", folder / "myproject")
    succeeded(*PIP, "--python", environment / "bin/python", *install, cwd=folder)
    return folder / "myproject"


def test_simbal_is_that_of_the_wheel(environment, project):
    where = "import simbal, hydra_plugins.simbal_plugins.grid as grid; print(simbal.__file__, grid.__file__)"
    for file in succeeded(environment / "bin/python", "-c", where, cwd=project).split():
        assert Path(file).is_relative_to(environment)


def test_it_has_every_config_and_every_file_of_data(environment):
    [packages] = environment.glob("lib/python*/site-packages")
    tracked = succeeded("git", "ls-files", "src", "conf", "sweeps", cwd=ROOT).split()
    assert len(tracked) > 250
    for name in tracked:
        place = name.replace("sweeps/", "conf/sweeps/") if name.startswith("sweeps/") else name
        installed = packages / (place.removeprefix("src/") if name.startswith("src/") else f"simbal/{place}")
        assert installed.is_dir() if (ROOT / name).is_symlink() else installed.is_file(), name


def test_the_main_job_and_the_project_run_and_nothing_of_the_checkout_is_opened(environment, project):
    simbal = environment / "bin/simbal"
    table = succeeded(simbal, "train", "-m", "balancing=simbal,lbl", "seed=0,1", *KEYS, cwd=project)
    assert "4 new" in table
    assert len([*project.glob("outputs/default/*/record.json")]) == 4
    succeeded(simbal, "train", "-m", "sweeps=mine", "seed=0", *KEYS, cwd=project)
    runs = {folder.name.partition("-")[0] for folder in project.glob("outputs/mine/*/")}
    assert runs == {"mine", "lbl"}
    reported = succeeded(simbal, "report", "outputs/mine", cwd=project)
    assert "mine" in reported
    succeeded(simbal, "evaluate", "run=outputs/mine", "analysis=quality", cwd=project)
    assert len([*project.glob("outputs/mine/*/analysis/quality.json")]) == 2
    [own] = project.glob("outputs/mine/mine-*/")
    succeeded(simbal, "train", f"run={own}", cwd=project)  # its class is a registered one
    refused = run(simbal, "train", "balancing=mime", cwd=project)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "did you mean mine?" in refused.stderr
    assert not (environment / "opened").exists(), (environment / "opened").read_text()


def test_the_watch_would_see_a_file_of_the_checkout(environment, project):
    succeeded(environment / "bin/python", "-c", f"open({str(ROOT / 'conf/config.yaml')!r})", cwd=project)
    assert (environment / "opened").read_text() == f"{ROOT / 'conf/config.yaml'}\n"
    (environment / "opened").unlink()
