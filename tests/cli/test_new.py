"""`simbal new` creates a working project, and options of the current folder are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from simbal.cli.help import help_page
from simbal.cli.new import write_project
from simbal.config.options import CONF
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.conftest import MARKOV, SMALL
from tests.in_process import run


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a new project, which is the current folder and whose package can be imported."""
    folder = tmp_path / "myproject"
    write_project(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("myproject", "myproject.balancing"):
        sys.modules.pop(name, None)


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides], return_hydra_config=True)


def test_project_has_a_package_configs_and_a_test(project):
    files = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
    assert files == {
        "pyproject.toml", "README.md", ".gitignore", "myproject/__init__.py", "myproject/balancing.py",
        "conf/balancing/mine.yaml", "sweeps/mine.yaml", "tests/test_mine.py",
    }  # fmt: skip
    assert "NAME" not in "".join(file.read_text() for file in project.rglob("*") if file.is_file())
    assert [file.name for file in project.parent.iterdir()] == ["myproject"]


@pytest.mark.parametrize("name", ["My-Project", "class", "torch", "json", "taken"])
def test_name_that_cannot_be_a_new_package_is_refused(tmp_path, name):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(UserError, match=name):
        write_project(tmp_path / name)


def test_the_current_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(UserError, match="is the current folder: run `simbal new mine`"):
        write_project(Path())


def test_strategy_of_a_project_trains(project, tmp_path, cache_dir):
    places = [f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}", "balancing=mine"]
    spec = RunSpec.from_hydra(composed(*SMALL, *MARKOV, *places))
    train(spec)
    assert RunFolder(spec.path).read_record()["objective"]["mine"]["effective_coef"] == pytest.approx(0.02)


def test_options_and_sweeps_of_the_current_folder_are_found_and_listed(project):
    (project / "seed").mkdir()  # not a group
    for command, expected in [
        ("balancing=mine balancing.mine.cof=2", "balancing.mine.coef"),
        ("balancing=mime", "mine"),
        ("-m sweeps=mime", "mine"),
    ]:
        done = run(project, "train.py", *command.split())
        assert done.returncode == 2
        assert expected in done.stderr.partition("did you mean")[2]
    assert "a strategy of my own" in help_page("", "config", ["balancing"])
    assert "Does my strategy" in help_page("", "config", ["sweeps"])
    cfg = composed("balancing=mine", "sweeps=mine", "seed=1")
    assert (cfg.balancing.mine.coef, cfg.hydra.sweeper.params.balancing, cfg.seed) == (0.01, "mine,lbl", 1)


@pytest.mark.slow  # starts Python anew
def test_tests_of_a_project_pass_and_fail_if_a_declared_property_is_wrong(project, tmp_path):
    def run_its_tests(*arguments):
        basetemp = f"--basetemp={tmp_path / 'its-tests'}"  # keeps the temporary folders of this suite
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", basetemp, *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYT", "SLIPCOVER_"))}
        return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)

    passed = run_its_tests()
    assert passed.returncode == 0, passed.stdout
    code = project / "myproject/balancing.py"
    code.write_text(code.read_text().replace('scope="micro"', 'scope="global"'))
    failed = run_its_tests("-k", "micro_batches_matter")
    assert failed.returncode == 1
    assert "micro_batches_matter_only_if_declared" in failed.stdout
