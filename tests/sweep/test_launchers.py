"""What is missing for a launcher is said before anything starts; Ray and Slurm have files of their own."""

import sys
from pathlib import Path

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
