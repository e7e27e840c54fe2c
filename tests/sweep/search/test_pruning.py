"""A search stops trials whose curves are worse than those of others, and says so in the record and in the study."""

import json

import pytest
from optuna.trial import TrialState

from simbal.runs.folder import RunFolder
from tests.sweep.search.app import COEF, SearchApp

PRUNING = (
    "hydra.sweeper.pruner=median", "hydra.sweeper.pruner_startup_trials=1", "hydra.sweeper.n_jobs=1",
    "trainer.val_every=5",
)  # fmt: skip


@pytest.fixture
def app(tmp_path):
    app = SearchApp(tmp_path)
    app.behave(slow_above=0, endless_above=50)  # a bad one ends by being pruned
    return app


def grid(*coefs):
    return (f"balancing.simbal.coef={','.join(map(str, coefs))}", "hydra.sweeper.sampler=grid")


def statuses(app, trial):
    return [RunFolder(app.folder / run).read_record()["status"] for run in trial.user_attrs["runs"]]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite:///s.db", "journal:s.log"])
def test_a_bad_curve_is_pruned_with_all_its_seeds_and_counts(app, storage):
    search = app.run("name=s", *grid(1, 100), *PRUNING, "seed=0-1", f"hydra.sweeper.storage={storage}")
    assert search.returncode == 0, search.stderr
    line = next(line for line in search.stdout.splitlines() if " pruned " in line and "trial 1" in line)
    assert "val/ppl was 102 at step 5" in line
    study = json.loads((app.folder / "outputs/s/table.json").read_text())
    assert [row["status"] for row in study["without_result"]] == ["pruned", "pruned"]
    assert not [*app.folder.glob("outputs/*/*/prune.json")]
    again = app.run("name=s", *grid(1, 100), *PRUNING, "seed=0-1", f"hydra.sweeper.storage={storage}")
    assert "2 of 2 trials done" in again.stdout
    assert len(app.started) == 4


def test_a_pruned_trial_is_told_as_pruned(app):
    app.run("name=s", *grid(1, 100), *PRUNING)
    good, bad = app.study().trials
    assert (good.state, bad.state) == (TrialState.COMPLETE, TrialState.PRUNED)
    assert statuses(app, bad) == ["pruned"]
    assert bad.intermediate_values == {5: 102.0}


def test_a_study_in_memory_prunes_as_well(app):
    assert " pruned " in app.run(*grid(1, 100), *PRUNING).stdout


@pytest.mark.parametrize("pruner", ["hyperband", "successive_halving"])
def test_other_pruners_run(app, pruner):
    app.behave()
    assert app.run(COEF, f"hydra.sweeper.pruner={pruner}", "hydra.sweeper.n_trials=2").returncode == 0


def test_without_a_pruner_nothing_is_pruned(app):
    app.behave(slow_above=50)
    assert app.run("name=s", *grid(1, 100)).returncode == 0
    assert [trial.state for trial in app.study().trials] == [TrialState.COMPLETE] * 2
