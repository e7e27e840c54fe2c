"""What could not stand in one table is refused before anything is trained."""

import json
import shutil

import pytest

from tests.conftest import CONF

SWEEP = ("-m", "balancing=simbal,lbl", "seed=0")


def refused(app, *arguments: str) -> str:
    """What a command says that starts no run."""
    before = len(app.started)
    done = app.run(*arguments)
    assert done.returncode == 1
    assert len(app.started) == before
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_runs_of_another_length_in_the_folder(app):
    app.run(*SWEEP)
    said = refused(app, *SWEEP, "trainer.max_steps=20")
    assert "outputs/default holds runs of trainer.max_steps=1000, and these are of 20" in said
    assert "give another name= than default" in said
    assert "holds runs of trainer.max_steps=1000" in refused(app, *SWEEP, "trainer.max_steps=20", "dry_run=true")
    assert app.run(*SWEEP, "trainer.max_steps=20", "name=other").returncode == 0


def test_two_lengths_in_one_sweep(app):
    said = refused(app, "-m", "balancing=lbl", "trainer.max_steps=20,30")
    assert (
        "trainer.max_steps=20 and trainer.max_steps=30 cannot stand in one table: give each a sweep with a name="
        in said
    )
    assert app.run("-m", "trainer.max_steps=20", "name=a").returncode == 0
    assert app.run("-m", "trainer.max_steps=30", "name=b").returncode == 0


def test_other_data_in_the_folder(app):
    app.run(*SWEEP)
    before = (app.folder / "outputs/default/sweep.json").read_bytes()
    app.behave({}, tokens="c")
    said = refused(app, "-m", "balancing=simbal,lbl", "seed=1")
    assert "outputs/default holds runs on other data than these" in said
    assert (app.folder / "outputs/default/sweep.json").read_bytes() == before


def test_a_gpu_that_there_is_not(app):
    assert "hydra.launcher.gpus: 5 is not a GPU" in refused(app, *SWEEP, "hydra.launcher.gpus=[5]")
    assert not (app.folder / "outputs").exists()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("[ppl,pepl]", "columns: no run has pepl; the closest are val/ppl"),
        ("[redundancy.min_pes]", "evaluate.py"),
    ],
)
def test_a_column_that_there_is_not(app, columns, said):
    assert said in refused(app, *SWEEP, f"columns={columns}")


def test_the_table_is_as_the_newest_command_says(app):
    app.run(*SWEEP)
    app.run(*SWEEP, "columns=[loss]", "equivalence_margin=0.5")
    table = json.loads((app.folder / "outputs/default/table.json").read_text())
    assert ([*table["metrics"]], table["equivalence_margin"]) == (["val/loss"], 0.5)


def test_a_baseline_that_no_arm_is(app):
    assert "baseline=lbk: no arm is that; there is lbl, " in refused(app, *SWEEP, "baseline=lbk")
    assert app.run(*SWEEP, "baseline=simbal").returncode == 0


def test_a_baseline_may_be_an_arm_or_a_run_that_is_there_already(app):
    app.run("-m", "balancing=none")
    assert app.run(*SWEEP, "baseline=none").returncode == 0
    arms = ("-m", "balancing=simbal", "balancing.simbal.coef=0.1,1", "name=arms")
    assert app.run(*arms, "baseline='simbal coef=1'").returncode == 0
    assert "there is simbal coef=1, " in refused(app, *arms, "baseline='simbal coef=2'")


def test_a_named_sweep_that_is_narrowed_beside_its_baseline_says_so_and_runs(app):
    (app.folder / "sweeps").mkdir()
    study = CONF.parent / "results/significance_retuned_whole/sweep.yaml"
    shutil.copy(study, app.folder / "sweeps/retuned.yaml")
    narrowed = app.run("-m", "sweeps=retuned", "router.init=normal", "seed=10")
    said = " ".join(narrowed.stdout.split())
    assert "baseline=lbl init=normal eps=3e-05: no arm is that; there is lbl eps=3e-05, " in said
    assert "the table will show no difference" in said
    assert narrowed.returncode == 0
    assert len(app.started) == 4
    named = app.run("-m", "sweeps=retuned", "router.init=normal", "seed=10", "baseline=lbl")
    assert "no arm is that" not in named.stdout
