"""A search that is killed at any moment, and again, ends with the trials of one that was left alone."""

import random
import time

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from simbal.sweep.search import run
from tests.sweep.search.app import COEF, SearchApp
from tests.sweep.search.in_process import SearchHere

JOURNAL = "journal:s.log"


class Killed(BaseException):
    """Not an Exception, so that nothing handles it."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Makes searches in folders of their own; the table is not what is tested here."""
    monkeypatch.setattr(run, "report", lambda *_: None)

    def make(name):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return SearchHere(tmp_path / name)

    return make


@pytest.fixture
def kill_at(monkeypatch):
    """`kill_at(7, after=False)`: end the search before its seventh write to the study; returns how many there were."""
    append, writes = JournalFileBackend.append_logs, []

    def arm(number, after):
        writes.clear()

        def write(self, logs):
            writes.append(logs)
            if len(writes) == number and not after:
                raise Killed
            append(self, logs)
            if len(writes) == number and after:
                raise Killed

        monkeypatch.setattr(JournalFileBackend, "append_logs", write)
        return writes

    return arm


def complete(search, grid=False):
    study = search.study(JournalStorage(JournalFileBackend("s.log")))
    done = study.get_trials(states=(TrialState.COMPLETE,))
    assert not study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))
    trials = [(trial.params, trial.values, trial.user_attrs["runs"]) for trial in done]
    return sorted(trials, key=str) if grid else trials


TPE = {"sampler": "tpe", "lines": ["optim.lr=interval(1e-4,1e-2)"]}
GRID = {"sampler": "grid", "lines": ["balancing.simbal.coef=0.1,1,10"], "n_trials": None}


@pytest.mark.slow
@pytest.mark.parametrize("how", [TPE, GRID], ids=["tpe", "grid"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_write_changes_no_trial(place, kill_at, how, after):
    how = {"storage": JOURNAL, **how}
    lines = how.pop("lines")
    whole = place("whole")
    writes = kill_at(0, after)
    whole.run(*lines, **how)
    grid = how["sampler"] == "grid"  # of which only the order may change
    expected, count = complete(whole, grid), len(writes)
    assert len(expected) == 3
    for number in range(1, count + 1):
        search = place(str(number))
        kill_at(number, after)
        with pytest.raises(Killed):
            search.run(*lines, **how)
        kill_at(0, after)
        search.run(*lines, **how)
        assert complete(search, grid) == expected, number
        assert {*search.launcher.launched} == {*whole.launcher.launched}, number


def test_a_search_that_is_killed_again_and_again_ends_as_one_that_was_left_alone(place, kill_at):
    how = {"storage": JOURNAL, "sampler": "random", "n_trials": 4}
    whole, search = place("whole"), None
    whole.run(**how)
    expected = complete(whole)
    search, choice = place("killed"), random.Random(0)
    for _ in range(25):
        kill_at(choice.randrange(1, 12), choice.random() < 0.5)
        try:
            search.run(**how)
        except Killed:
            continue
    kill_at(0, False)
    search.run(**how)
    assert complete(search) == expected


@pytest.mark.slow
def test_kill_9_at_random_moments_changes_no_trial(tmp_path):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler=random")
    folders = [tmp_path / name for name in ("killed", "whole")]
    for folder in folders:
        folder.mkdir()
    app, whole = map(SearchApp, folders)
    assert whole.run(*how).returncode == 0
    choice = random.Random(0)
    for _ in range(5):
        process, before = app.start(*how), len(app.started)
        app.wait_until(lambda: process.poll() is not None or len(app.started) > before)  # noqa: B023
        time.sleep(choice.random())
        app.kill(process, jobs=0)
    assert app.run(*how).returncode == 0
    studies = [app.study(), whole.study()]
    done = [[(t.params, t.values) for t in study.get_trials(states=(TrialState.COMPLETE,))] for study in studies]
    assert len(done[0]) == 4
    assert done[0] == done[1]
    assert TrialState.RUNNING not in {trial.state for trial in app.study().trials}
