"""A search that is killed at any write to its study ends with the same trials as an uninterrupted search."""

import random

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tests.sweep.search.in_process import SPACE, SearchHere

TPE = {"sampler": "tpe", "n_trials": 3, "space": (*SPACE, "optim.lr=interval(1e-4,1e-2)")}
RANDOM = {"sampler": "random", "n_trials": 4}


class KilledError(BaseException):
    """Not an `Exception`, so that nothing handles it."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """`place("a")` returns a search in its own folder."""

    def make(name):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return SearchHere(tmp_path / name)

    return make


@pytest.fixture
def kill_at(monkeypatch):
    """`kill_at(7, after=False)` kills the search before its seventh write to the study, and returns all writes."""
    append, writes = JournalFileBackend.append_logs, []

    def arm(number, after):
        writes.clear()

        def write(self, logs):
            writes.append(logs)
            if len(writes) == number and not after:
                raise KilledError
            append(self, logs)
            if len(writes) == number and after:
                raise KilledError

        monkeypatch.setattr(JournalFileBackend, "append_logs", write)
        return writes

    return arm


def run(search, how):
    search.run(storage="journal:s.log", **how)


def complete(search):
    trials = search.trials(storage=JournalStorage(JournalFileBackend("s.log")))
    assert not {trial.state for trial in trials} & {TrialState.RUNNING, TrialState.WAITING}
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return [(trial.params, trial.values, trial.user_attrs["runs"]) for trial in done]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_write_changes_no_trial(place, kill_at, after):
    whole = place("whole")
    writes = kill_at(0, after)
    run(whole, TPE)
    expected, count = complete(whole), len(writes)
    assert len(expected) == 3
    for number in range(1, count + 1):
        search = place(str(number))
        kill_at(number, after)
        with pytest.raises(KilledError):
            run(search, TPE)
        kill_at(0, after)
        run(search, TPE)
        assert complete(search) == expected, number
        assert {*search.launcher.launched} == {*whole.launcher.launched}, number


def test_a_search_that_is_killed_repeatedly_has_the_trials_of_an_uninterrupted_one(place, kill_at):
    whole = place("whole")
    run(whole, RANDOM)
    expected = complete(whole)
    search, choice = place("killed"), random.Random(0)
    for _ in range(20):
        kill_at(choice.randrange(1, 12), choice.random() < 0.5)
        try:
            run(search, RANDOM)
        except KilledError:
            continue
    kill_at(0, False)
    run(search, RANDOM)
    assert complete(search) == expected
