"""Runs that do not fit into one table are refused before anything is trained."""

import pytest

SWEEP = ("-m", "balancing=simbal,lbl", "seed=0")
OWN_SWEEP = """\
# @package _global_
name: own
baseline: lbl init=normal
hydra:
  sweeper:
    params: {balancing: "lbl,simbal", router.init: "normal,orthogonal", seed: 10-11}
"""


def refuse(app, *arguments: str) -> str:
    """Return the error of a command that starts no run."""
    before = len(app.started)
    done = app.run(*arguments)
    assert done.returncode == 1
    assert len(app.started) == before
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_runs_of_different_lengths_need_different_names(app):
    error = refuse(app, "-m", "balancing=lbl", "trainer.max_steps=20,30")
    assert "trainer.max_steps=20 and trainer.max_steps=30 cannot share a table: choose a different name=" in error
    app.run("-m", "balancing=lbl", "seed=0")
    for more in ([], ["dry_run=true"]):
        error = refuse(app, *SWEEP, "trainer.max_steps=20", *more)
        assert "outputs/default contains runs of trainer.max_steps=1000, not 20" in error
    assert app.run("-m", "balancing=lbl", "trainer.max_steps=20", "name=other").returncode == 0


@pytest.mark.parametrize(("columns", "named"), [("[ppl,pepl]", "val/ppl"), ("[redundancy.min_pes]", "evaluate.py")])
def test_an_unknown_column_is_refused(app, columns, named):
    assert named in refuse(app, *SWEEP, f"columns={columns}")


def test_an_invalid_job_is_refused_before_the_first_job_starts(app):
    sweep = app.run("-m", "model.top_k=4,99")
    assert (sweep.returncode, app.started) == (2, [])
    assert "model.top_k=99" in sweep.stderr
    assert not (app.folder / "outputs").exists()


def test_a_baseline_must_be_an_arm_or_a_finished_run(app):
    assert "baseline=lbk is not an arm of this sweep; the closest are lbl" in refuse(app, *SWEEP, "baseline=lbk")
    app.run("-m", "balancing=none")
    assert app.run(*SWEEP, "baseline=none", "columns=[loss]", "equivalence_margin=0.5").returncode == 0
    table = app.table()
    assert ([*table["metrics"]], table["equivalence_margin"]) == (["val/loss"], 0.5)  # as in the newest command
    arms = ("-m", "balancing=simbal", "balancing.simbal.coef=0.1,1", "name=arms")
    assert app.run(*arms, "baseline='simbal coef=1'").returncode == 0
    assert "closest are simbal coef=1, " in refuse(app, *arms, "baseline='simbal coef=2'")


def test_a_named_sweep_without_its_baseline_runs(app):
    (app.folder / "sweeps").mkdir()
    (app.folder / "sweeps/own.yaml").write_text(OWN_SWEEP)
    narrowed = app.run("-m", "sweeps=own", "router.init=normal", "seed=10")
    assert narrowed.returncode == 0
    assert len(app.started) == 2
    assert "No difference for " in (app.folder / "outputs/own/table.md").read_text()
