"""What is missing for a launcher is said before anything starts; Ray and Slurm have files of their own."""

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.cli.hydra_keys import PACKAGES, check_launcher
from simbal.errors import UserError

SLURM = ("hydra/launcher=slurm", "hydra.launcher.partition=gpu")


def test_a_dry_run_gives_nothing_away(app):
    sweep = app.run("-m", "seed=0-1", "dry_run=true", *SLURM)
    assert (sweep.returncode, app.started) == (0, [])
    assert "0 finished, 0 resumed, 2 new" in sweep.stdout
    assert not (app.folder / "outputs").exists()


def test_a_machine_without_slurm_is_one_sentence_and_no_run_has_begun(app):
    sweep = app.run("-m", "seed=0-1", *SLURM, PATH=str(Path(sys.executable).parent))
    assert (sweep.returncode, app.started) == (1, [])
    assert sweep.stderr.startswith('error: hydra/launcher=slurm: Could not detect "srun"'), sweep.stderr


@pytest.mark.parametrize("name", [*PACKAGES])
def test_a_launcher_that_is_not_installed_is_named_with_its_remedy(name, monkeypatch):
    overrides = OverridesParser.create().parse_overrides([f"hydra/launcher={name}"])
    monkeypatch.setattr("simbal.cli.hydra_keys.find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"hydra/launcher={name} is not installed: pip install 'simbal\[{name}\]'"):
        check_launcher(overrides)


@pytest.mark.parametrize("name", ["basic", "joblib", "submitit_local"])
def test_launchers_of_others_are_refused(app, name):
    sweep = app.run("-m", "seed=0-1", f"hydra/launcher={name}")
    assert sweep.returncode == 2
    assert f"hydra/launcher={name}: hydra/launcher has no option {name}" in sweep.stderr
    assert "(there is procs, ray, slurm)" in sweep.stderr
