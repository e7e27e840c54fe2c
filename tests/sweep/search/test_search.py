"""Searches: the number of trials, their points, and the effects of failures, stops and pruners."""

import csv
import signal

import optuna
import pytest
from optuna.trial import TrialState

from simbal.errors import BUSY, UserError
from tests.composing import refusal
from tests.sweep.search.in_process import COEF, SPACE, SearchHere

OPTUNA = ("-m", "hydra/sweeper=optuna", "name=s")
PRUNING = ("hydra.sweeper.pruner=median", "hydra.sweeper.pruner_startup_trials=1", "trainer.val_every=5")
COMPLETE, FAIL, PRUNED = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return SearchHere(tmp_path)


def coefs(trials):
    return [trial.params[COEF] for trial in trials]


def test_n_trials_is_the_total_and_a_finished_study_starts_nothing(search):
    assert search.run(n_trials=2).startswith("study s: 0 of 2 trials done, 2 to run\n")
    assert "2 of 5 trials done, 3 to run" in search.run(n_trials=5)
    again = search.run(n_trials=5)
    assert "5 of 5 trials done\n" in again
    assert "best: trial " in again
    assert "The value of the best of 5 trials is biased" in again
    assert len(search.launcher.launched) == 5
    assert len({*coefs(search.trials())}) == 5  # the seed of the sampler does not repeat points
    rows = [*csv.DictReader((search.folder / "outputs/s/trials.csv").read_text().splitlines())]
    assert [row["state"] for row in rows] == ["complete"] * 5
    assert all((search.folder / row["runs"] / "record.json").exists() for row in rows)


def test_every_trial_runs_all_seeds_and_gets_their_mean(search):
    search.run("seed=0-2", n_trials=2)
    for trial in search.trials():
        assert [round(row[0] - trial.value, 6) for row in trial.user_attrs["replicates"]] == [-0.001, 0, 0.001]


def test_only_the_failed_replicate_is_repeated(search):
    how = {"n_trials": 1, "max_failure_rate": 0.0}
    search.launcher.crash = lambda seed, _: seed == 1
    with pytest.raises(UserError, match=r"1 of 1 trials .*max_failure_rate=0 of 1 .* seed=1 RuntimeError"):
        search.run("seed=0-2", **how)
    before = {path: path.stat().st_mtime_ns for path in search.folder.glob("outputs/s/*/record.json")}
    search.launcher.crash = lambda *_: False
    search.run("seed=0-2", "retry_failed=true", **how)
    changed = [path for path, time_ns in before.items() if path.stat().st_mtime_ns != time_ns]
    assert len(before) == 3
    assert ["seed1" in str(path) for path in changed] == [True]
    assert len({*coefs(search.trials())}) == 1


def test_failed_trials_are_replaced_up_to_the_failure_rate(search):
    search.launcher.crash = lambda _, coef: coef > 1
    out = search.run(n_trials=6, max_failure_rate=1.0)
    failed = search.trials(FAIL)
    assert failed
    assert len(search.trials(COMPLETE)) == 6
    assert all(trial.user_attrs["error"] == "RuntimeError: the loss is nan" for trial in failed)
    assert "failed" in out
    search.launcher.crash = lambda *_: True
    with pytest.raises(UserError, match=r"4 of 4 trials of the study s failed, more than .*max_failure_rate=0.5 of 7"):
        search.run(n_trials=7)


def test_several_objectives_have_a_pareto_front(search):
    how = {"objectives": ["val/ppl", "val/min_pes"], "directions": ["minimize", "maximize"]}
    assert "Pareto front of val/ppl, val/min_pes:" in search.run("trainer.pes_every=5", **how)
    assert all(len(trial.values) == 2 for trial in search.trials())


def test_an_objective_that_runs_did_not_measure_is_named(search):
    with pytest.raises(UserError, match=r"did not measure val/entropy; it has val/ppl, "):
        search.run(objectives=["val/entropy"])


def test_a_search_in_the_default_folder_is_in_memory_unless_it_has_a_study_name(search):
    search.run("name=default", n_trials=1)
    assert not (search.folder / "outputs/default/study.db").exists()
    search.run("name=default", n_trials=1, study_name="mine")
    storage = f"sqlite:///{search.folder}/outputs/default/study.db"
    assert len(optuna.load_study(study_name="mine", storage=storage).trials) == 1


@pytest.mark.parametrize(
    ("lines", "settings", "named"),
    [
        ([], {"directions": ["maximize"]}, "directions=minimize .now maximize"),
        ([f"{COEF}=interval(1,2)"], {}, "coef=FloatDistribution.high=10.0, log=True.* .now "),
        (["optim.lr=1e-2"], {}, "optim.lr=0.002 .now 0.01.;"),
        (["model=small"], {}, 'model="tiny" .now "small"'),
        (["seed=3"], {}, "seed=0 .now 3.;"),
        (["seed=0-1"], {}, "replicates= .now seed=0, seed=1"),
    ],
)
def test_a_study_with_other_settings_is_refused(search, lines, settings, named):
    search.run(n_trials=1)
    with pytest.raises(UserError, match=f"the study s was started with .*{named}"):
        search.run(*lines, n_trials=1, **settings)
    search.run("logger=none", n_trials=1)  # cannot change a result
    assert len(search.launcher.launched) == 1


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("foo", "hydra.sweeper.storage must be memory, journal:FILE, sqlite:///FILE or"),
        ("postgresql://ada:p@s:word@host/db", "hydra.sweeper.storage must be memory"),
        ("sqlite:///broken", "cannot use hydra.sweeper.storage: "),
        ("journal:broken", "cannot use hydra.sweeper.storage: "),
        ("journal:nowhere/study.log", "cannot use hydra.sweeper.storage=journal:nowhere/study.log: No such file"),
    ],
)
def test_an_invalid_or_corrupt_storage_is_refused(search, storage, message):
    (search.folder / "broken").write_text("this is no study\n" * 100)
    with pytest.raises(UserError, match=message):
        search.run(storage=storage)


def test_a_password_in_the_environment_is_not_shown(app):
    address = "oracle+cx_oracle://someone:verysecret@127.0.0.1:1/db"  # its driver is not installed
    how = (*OPTUNA, *SPACE, "hydra.sweeper.storage=${oc.env:OPTUNA_STORAGE}")
    search = app.run(*how, OPTUNA_STORAGE=address)
    assert search.returncode == 1
    assert "cannot use hydra.sweeper.storage: " in search.stderr
    assert "secret" not in search.stdout + search.stderr
    assert all(b"secret" not in file.read_bytes() for file in app.folder.rglob("*") if file.is_file())


def test_each_arm_has_its_own_study_and_all_share_a_table(app):
    arms = f'["balancing=simbal {SPACE[0]}","balancing=lbl balancing.lbl.coef=1,2"]'
    search = app.run(*OPTUNA, f"hydra.sweeper.arms={arms}", "hydra.sweeper.n_trials=2")
    assert search.returncode == 0, search.stderr
    assert len(app.study("s/balancing=simbal " + SPACE[0]).trials) == 2
    assert len(app.study("s/balancing=lbl balancing.lbl.coef=1,2").trials) == 2
    assert {arm["label"]["balancing"] for arm in app.table("s")["arms"]} == {"simbal", "lbl"}


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["model.top_k=4,99"], 2, "model.top_k=99"),
        (["hydra.sweeper.objectives=[val/pp]"], 1, "the closest are val/ppl, "),
        (["columns=[nonsense]"], 1, "nonsense"),
        (["trainer.max_steps=12,14"], 1, "trainer.max_steps=12 and trainer.max_steps=14 cannot share a table"),
        (["hydra.launcher.gpus=[5]"], 1, "hydra.launcher.gpus: 5 is not a GPU"),
        (["hydra.sweeper.storage=${oc.env:NO_SUCH_STORAGE}"], 2, "NO_SUCH_STORAGE is not set"),
        (["dry_run=true"], 0, ""),
    ],
)
def test_errors_and_dry_runs_start_nothing(app, arguments, code, named):
    search = app.run(*OPTUNA, *SPACE, *arguments)
    assert (search.returncode, app.started) == (code, [])
    assert named in search.stderr
    assert not (app.folder / "outputs/s/sweep.json").exists()


def test_a_grid_sweeper_refuses_the_keys_of_a_search():
    code, error = refusal("train.py", ["-m", "sweeps=coefficient_search", "hydra/sweeper=grid"])
    assert code == 2
    assert "n_trials" in error


def test_a_bad_curve_is_pruned_with_all_its_seeds(app):
    app.behave(slow_above=0, endless=True)  # a bad run ends only when it is pruned
    total = ("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "seed=0-1")
    how = (*OPTUNA, f"{COEF}=1,100", "hydra.sweeper.sampler=random", *total)  # samples 1, then 100
    search = app.run(*how, *PRUNING)
    assert search.returncode == 0, search.stderr
    good, bad = app.study().trials
    assert (good.state, bad.state) == (COMPLETE, PRUNED)
    assert "val/ppl was 102 at step 5" in bad.user_attrs["error"]
    assert [row["status"] for row in app.table("s")["without_result"]] == ["pruned", "pruned"]
    assert not [*app.folder.glob("outputs/*/*/prune.json")]
    assert "2 of 2 trials done" in app.run(*how, *PRUNING).stdout
    assert len(app.started) == 4


@pytest.mark.parametrize("pruner", ["none", "hyperband", "successive_halving"])
def test_other_pruners_run(search, pruner):
    search.run(pruner=pruner)
    assert len(search.trials(COMPLETE)) == 3


@pytest.mark.slow
def test_a_stopped_search_resumes_and_only_one_search_uses_a_folder(app):
    app.behave(hang_after=1)
    how = (*OPTUNA, *SPACE, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    process = app.start(*how)
    app.wait_until(lambda: len(app.hanging) == 2)
    second = app.run(*how)
    assert second.returncode == BUSY
    assert "outputs/s is being written by another process" in second.stderr
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not any(app.alive(pid) for pid in app.hanging)
    app.behave()
    assert "1 of 3 trials done, 2 to run" in app.run(*how).stdout
    assert len(app.study().get_trials(states=(COMPLETE,))) == 3
