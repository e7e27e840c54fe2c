"""A search from the command line to its table: how many trials, which points, and what a kill or a failure changes."""

import csv
import signal

import pytest
from optuna.trial import TrialState

from tests.sweep.search.app import COEF, SearchApp


@pytest.fixture
def app(tmp_path):
    return SearchApp(tmp_path)


def trials(app, *states, **where):
    return app.study(**where).get_trials(states=states or None)


def coefs(app, *states, **where):
    return [trial.params["balancing.simbal.coef"] for trial in trials(app, *states, **where)]


def test_n_trials_is_the_total_and_a_finished_study_starts_nothing(app):
    first = app.run("name=s", COEF, "hydra.sweeper.n_trials=2")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("study s in sqlite:///outputs/s/study.db: 0 of 2 trials done, 2 to run\n")
    more = app.run("name=s", COEF, "hydra.sweeper.n_trials=5")
    assert "2 of 5 trials done, 3 to run" in more.stdout
    assert len(app.started) == 5
    again = app.run("name=s", COEF, "hydra.sweeper.n_trials=5")
    assert again.returncode == 0
    assert "5 of 5 trials done\n" in again.stdout
    assert "best: trial " in again.stdout
    assert "The best of 5 trials looks better than it is" in again.stdout
    assert len(app.started) == 5
    assert len({*coefs(app)}) == 5  # the sampler's seed does not repeat its points
    rows = [*csv.DictReader((app.folder / "outputs/s/trials.csv").read_text().splitlines())]
    assert [row["state"] for row in rows] == ["complete"] * 5
    assert all((app.folder / row["runs"] / "record.json").exists() for row in rows)
    assert (app.folder / "outputs/s/table.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_killed_search_goes_on_with_the_points_that_it_would_have_had(app, tmp_path, sampler):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=5", f"hydra.sweeper.sampler={sampler}", "hydra.sweeper.n_jobs=1")
    app.behave(hang_after=2)
    app.kill(app.start(*how), jobs=3)
    app.behave()
    assert app.run(*how).returncode == 0
    (tmp_path / "whole").mkdir()
    whole = SearchApp(tmp_path / "whole")
    assert whole.run(*how).returncode == 0
    assert coefs(app, TrialState.COMPLETE) == coefs(whole, TrialState.COMPLETE)
    assert len(app.started) == 6  # the third job twice
    (stale,) = trials(app, TrialState.FAIL)
    (again,) = [trial for trial in trials(app) if trial.user_attrs.get("retry_of") == stale.number]
    assert again.params == stale.params
    assert again.user_attrs["runs"] == stale.user_attrs["runs"]


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_stopped_search_can_go_on(app, number, code):
    app.behave(hang_after=1)
    process = app.start("name=s", COEF, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    app.wait_until(lambda: len(app.started) == 2)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in said
    assert not any(app.alive(job["pid"]) for job in app.started)
    app.behave()
    again = app.run("name=s", COEF, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    assert "1 of 3 trials done, 2 to run" in again.stdout
    assert len(trials(app, TrialState.COMPLETE)) == 3


def test_every_trial_runs_all_seeds_and_is_told_their_mean(app):
    assert app.run("name=s", COEF, "hydra.sweeper.n_trials=2", "seed=0-2").returncode == 0
    assert sorted(job["seed"] for job in app.started) == [0, 0, 1, 1, 2, 2]
    for trial in trials(app):
        assert trial.value == pytest.approx(sum(row[0] for row in trial.user_attrs["replicates"]) / 3)
        assert [round(row[0] - trial.value, 6) for row in trial.user_attrs["replicates"]] == [-0.001, 0, 0.001]


def test_only_the_failed_replicate_is_run_again(app):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=1", "seed=0-2", "hydra.sweeper.max_failure_rate=0")
    app.behave(crash_seed=1)
    first = app.run(*how)
    assert first.returncode == 1
    assert "1 of 1 trials of the study s failed, more than hydra.sweeper.max_failure_rate=0 of 1" in first.stderr
    assert "the last: seed=1 RuntimeError" in first.stderr
    app.behave()
    again = app.run(*how, "retry_failed=true")
    assert again.returncode == 0, again.stderr
    assert sorted(job["seed"] for job in app.started) == [0, 1, 1, 2]
    assert len({*coefs(app)}) == 1


@pytest.mark.parametrize(
    ("how", "error"),
    [("crash_above", "RuntimeError: the loss is nan"), ("lacks_above", "has measured no val/ppl; it has val/min_pes")],
)
def test_failed_trials_are_replaced_by_others(app, how, error):
    app.behave(**{how: 1})
    search = app.run("name=s", COEF, "hydra.sweeper.n_trials=4", "hydra.sweeper.max_failure_rate=1")
    assert search.returncode == 0, search.stderr
    failed, complete = trials(app, TrialState.FAIL), trials(app, TrialState.COMPLETE)
    assert len(complete) == 4
    assert failed
    assert all(error in trial.user_attrs["error"] for trial in failed)
    assert "failed" in (app.folder / "outputs/s/trials.csv").read_text()


def test_a_search_of_which_everything_fails_stops(app):
    app.behave(crash_above=0)
    search = app.run("name=s", COEF, "hydra.sweeper.n_trials=4")
    assert search.returncode == 1
    assert "4 of 4 trials of the study s failed, more than hydra.sweeper.max_failure_rate=0.5 of 4" in search.stderr
    assert "the last: RuntimeError" in search.stderr
    assert "Traceback" not in search.stderr


def test_several_objectives_have_a_front(app):
    objectives = ("hydra.sweeper.objectives=[val/ppl,val/min_pes]", "hydra.sweeper.directions=[minimize,maximize]")
    search = app.run("name=s", COEF, "hydra.sweeper.n_trials=3", *objectives, "trainer.pes_every=5")
    assert search.returncode == 0, search.stderr
    assert "best trials, none of which is worse than another in every one of val/ppl, val/min_pes:" in search.stdout
    assert all(len(trial.values) == 2 for trial in trials(app))


def test_an_objective_that_is_not_measured_is_one_sentence(app):
    search = app.run(COEF, "hydra.sweeper.n_trials=1", "hydra.sweeper.objectives=[val/pp]")
    assert search.returncode == 1
    assert search.stderr.startswith("error: hydra.sweeper.objectives: no run measures val/pp; there is val/ppl, ")
    assert not app.started


def test_an_objective_that_these_runs_do_not_measure_is_one_sentence(app):
    search = app.run(COEF, "hydra.sweeper.n_trials=1", "hydra.sweeper.objectives=[val/entropy]")
    assert search.returncode == 1
    assert "has measured no val/entropy; it has val/ppl, val/min_pes, val/max_vio, tokens_per_second" in search.stderr


def test_a_grid_runs_every_point_once_and_tells_of_failed_ones(app):
    how = ("name=s", "balancing.simbal.coef=0.1,1,10", "hydra.sweeper.sampler=grid")
    app.behave(crash_above=5)
    first = app.run(*how)
    assert first.returncode == 1
    assert first.stderr == "error: 1 points of the grid failed; retry_failed=true tries them again\n"
    assert sorted(job["coef"] for job in app.started) == [0.1, 1, 10]
    app.behave()
    assert app.run(*how).returncode == 1
    assert len(app.started) == 3
    assert app.run(*how, "retry_failed=true").returncode == 0
    assert [job["coef"] for job in app.started[3:]] == [10]


def test_each_arm_has_a_study_of_its_own(app):
    arms = (
        '["balancing=simbal balancing.simbal.coef=tag(log,interval(1e-3,10))","balancing=lbl balancing.lbl.coef=1,2"]'
    )
    search = app.run("name=s", f"hydra.sweeper.arms={arms}", "hydra.sweeper.n_trials=2")
    assert search.returncode == 0, search.stderr
    where = {"storage": f"sqlite:///{app.folder}/outputs/s/study.db"}
    assert len(app.study("s/balancing=simbal " + COEF, **where).trials) == 2
    assert len(app.study("s/balancing=lbl balancing.lbl.coef=1,2", **where).trials) == 2


def test_a_nonsense_value_is_refused_before_anything_runs(app):
    search = app.run("name=s", COEF, "model.top_k=4,99")
    assert search.returncode == 2
    assert "model.top_k=99" in search.stderr
    assert app.started == []
    assert not (app.folder / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["columns=[nonsense]"], "columns: nonsense is none of them"),
        (["trainer.max_steps=12,14"], "trainer.max_steps=12 and trainer.max_steps=14 cannot stand in one table"),
        (["hydra.launcher.gpus=[5]"], "hydra.launcher.gpus: 5 is not a GPU"),
    ],
)
def test_what_would_spoil_the_table_or_cannot_be_launched_is_refused_before_anything_runs(app, arguments, said):
    search = app.run("name=s", COEF, *arguments)
    assert (search.returncode, app.started) == (1, [])
    assert search.stderr.startswith(f"error: {said}")
    assert not (app.folder / "outputs/s/sweep.json").exists()


def test_a_dry_run_changes_nothing(app):
    search = app.run("name=s", COEF, "dry_run=true")
    assert search.stdout == "dry run: study s in sqlite:///outputs/s/study.db: 20 trials in all\n"
    assert not (app.folder / "outputs").exists()
