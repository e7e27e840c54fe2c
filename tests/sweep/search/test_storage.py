"""Where a study is kept, and which study is refused."""

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from simbal.errors import BUSY, UserError
from simbal.sweep.search.optuna_study import format_storage
from tests.sweep.search.app import COEF, SearchApp


@pytest.fixture
def app(tmp_path):
    return SearchApp(tmp_path)


def journal(file):
    return JournalStorage(JournalFileBackend(str(file)))


def test_an_unnamed_study_is_kept_in_memory(app):
    assert "study default in memory: 0 of 1" in app.run(COEF, "hydra.sweeper.n_trials=1").stdout
    assert not (app.folder / "outputs/default/study.db").exists()


def test_a_study_name_alone_keeps_it(app):
    app.run(COEF, "hydra.sweeper.n_trials=1", "hydra.sweeper.study_name=mine")
    assert len(app.study("mine", f"sqlite:///{app.folder}/outputs/default/study.db").trials) == 1


def test_a_journal_goes_on_after_a_kill(app):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.storage=journal:s.log")
    app.behave(hang_after=1)
    app.kill(app.start(*how), jobs=2)
    app.behave()
    again = app.run(*how)
    assert again.returncode == 0, again.stderr
    assert "study s in journal:s.log: 1 of 3 trials done, 2 to run" in again.stdout
    trials = app.study(storage=journal(app.folder / "s.log")).trials
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) == 3
    assert len({job["coef"] for job in app.started}) == 3


def test_two_sweeps_do_not_share_a_study(app):
    app.behave(hang_after=0)
    first = app.start("name=s", COEF, "hydra.sweeper.n_trials=2")
    app.wait_until(lambda: len(app.started) >= 1)
    second = app.run("name=s", COEF, "hydra.sweeper.n_trials=2")
    first.terminate()
    first.communicate()
    assert second.returncode == BUSY
    assert second.stderr.startswith("error: outputs/s is being searched by another process")
    assert len(app.study().trials) <= 2


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (["hydra.sweeper.directions=[maximize]"], "directions=minimize (now maximize)"),
        (
            ["balancing.simbal.coef=interval(1,2)"],
            "coef=FloatDistribution(high=10.0, log=True, low=0.001, step=None) (now ",
        ),
        (["optim.lr=1e-2"], "optim.lr=0.002 (now 0.01);"),
        (["model=small"], 'model="tiny" (now "small")'),
        (["seed=3"], "seed=0 (now 3);"),
        (["seed=0-1"], "replicates= (now seed=0, seed=1)"),
    ],
)
def test_a_study_of_something_else_is_refused(app, change, values):
    app.run("name=s", COEF, "hydra.sweeper.n_trials=1")
    other = app.run("name=s", COEF, "hydra.sweeper.n_trials=1", *change)
    assert other.returncode == 1
    assert other.stderr.startswith("error: the study s was started with ")
    assert values in other.stderr
    assert len(app.started) == 1


def test_a_search_does_not_go_on_with_a_file_that_says_something_else_now(app):
    (app.folder / "sweeps").mkdir()
    file = app.folder / "sweeps" / "mine.yaml"
    text = "# @package _global_\ndefaults: [override /hydra/sweeper: optuna]\nname: s\noptim: {{warmup_steps: {}}}\n"
    how = (f"--config-dir={app.folder}", "sweeps=mine", COEF, "hydra.sweeper.n_trials=2")
    file.write_text(text.format(40))
    assert app.run(*how, "hydra.sweeper.n_trials=1").returncode == 0
    file.write_text(text.format(50))
    other = app.run(*how)
    assert "optim.warmup_steps=40 (now 50);" in other.stderr
    file.write_text(text.format(40))
    assert app.run(*how).returncode == 0
    assert len(app.started) == 2


def test_what_is_fixed_below_a_group_that_is_searched_counts(app):
    how = ("name=s", "model=tiny,small", "hydra.sweeper.n_trials=2")
    app.run(*how, "hydra.sweeper.n_trials=1")
    other = app.run(*how, "model.num_experts=8")
    assert "model.num_experts=16 (now 8)" in other.stderr
    assert len(app.started) == 1


def test_keys_that_cannot_change_a_result_may_differ(app):
    app.run("name=s", COEF, "hydra.sweeper.n_trials=1")
    assert app.run("name=s", COEF, "hydra.sweeper.n_trials=1", "logger=none").returncode == 0


@pytest.mark.parametrize("setting", ["sqlite:///broken", "journal:broken"])
def test_a_corrupt_file_is_one_sentence(app, setting):
    (app.folder / "broken").write_text("this is no study\n" * 100)
    search = app.run("name=s", COEF, f"hydra.sweeper.storage={setting}")
    assert search.returncode == 1
    assert search.stderr.startswith("error: ")
    assert len(search.stderr.splitlines()) == 1
    assert f"cannot use the study's storage {setting}: " in search.stderr
    assert app.started == []


@pytest.mark.parametrize("setting", ["foo", "", "x.y://a", "postgresql://ada:p@s:word@host/db"])
def test_words_that_are_no_storage_are_refused(setting):
    with pytest.raises(UserError, match="hydra.sweeper.storage is not one of memory, journal:FILE, sqlite:///FILE"):
        format_storage(setting)


def test_a_password_is_shown_nowhere(app):
    """Neither the console nor a file shows a password from the environment."""
    address = "oracle+cx_oracle://someone:verysecret@127.0.0.1:1/db"  # whose driver is not installed
    search = app.run("name=s", COEF, "hydra.sweeper.storage=${oc.env:OPTUNA_STORAGE}", OPTUNA_STORAGE=address)
    assert search.returncode == 1
    assert "cannot use the study's storage oracle+cx_oracle://someone:***@127.0.0.1:1/db: " in search.stderr
    assert len(search.stderr.splitlines()) == 1
    assert "secret" not in search.stdout + search.stderr
    assert all(b"secret" not in file.read_bytes() for file in app.folder.rglob("*") if file.is_file())


def test_a_variable_that_is_not_set_is_one_sentence(app):
    search = app.run("name=s", COEF, "hydra.sweeper.storage=${oc.env:NO_SUCH_STORAGE}")
    assert search.returncode == 2
    assert "the environment variable NO_SUCH_STORAGE is not set" in search.stderr
    assert len(search.stderr.splitlines()) == 1
