"""`simbal new` writes a project that works as it is."""

import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from simbal.cli import new
from simbal.config.options import CONF
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.conftest import MARKOV, SMALL


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a new project, in which one stands, and whose package is installed."""
    new.write(tmp_path / "myproject")
    monkeypatch.chdir(tmp_path / "myproject")
    monkeypatch.syspath_prepend(tmp_path / "myproject")
    yield tmp_path / "myproject"
    for name in ("myproject", "myproject.balancing"):
        sys.modules.pop(name, None)


def test_it_is_a_package_its_configs_and_its_test(project):
    files = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
    assert files == {
        "pyproject.toml", "README.md", ".gitignore", "myproject/__init__.py", "myproject/balancing.py",
        "conf/balancing/mine.yaml", "sweeps/mine.yaml", "tests/test_mine.py",
    }  # fmt: skip
    assert "NAME" not in "".join(file.read_text() for file in project.rglob("*") if file.is_file())
    assert len((project / "README.md").read_text().splitlines()) <= 10


def test_its_strategy_trains(project, tmp_path, cache_dir):
    places = [f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}", "balancing=mine"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        spec = RunSpec.from_hydra(compose("config", [*SMALL, *MARKOV, *places], return_hydra_config=True))
    train(spec)
    assert RunFolder(spec.path).read_record()["objective"]["mine"]["effective_coef"] == pytest.approx(0.02)


@pytest.mark.slow  # starts Python anew
def test_its_own_tests_pass_before_it_is_installed_and_fail_if_a_promise_is_broken(project, tmp_path):
    def pytest_of_it():
        place = f"--basetemp={tmp_path / 'its-tests'}"  # and deletes nothing of earlier runs of ours
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", place]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYT", "SLIPCOVER_"))}
        return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)

    passed = pytest_of_it()
    assert passed.returncode == 0, passed.stdout
    assert " passed" in passed.stdout
    code = project / "myproject/balancing.py"
    code.write_text(code.read_text().replace('scope="micro"', 'scope="global"'))
    broken = pytest_of_it()
    assert broken.returncode == 1
    assert "the_cut_into_micro_batches_matters_only_if_declared" in broken.stdout
