"""A study that is damaged, changed or foreign is one sentence, and can be rebuilt from the folders of its runs."""

import os
import random
import shutil
import sqlite3
from contextlib import closing

import optuna
import pytest
from optuna.trial import TrialState

from simbal.errors import BusyError, UserError
from simbal.files.locks import Lock
from simbal.runs.folder import RunFolder
from simbal.sweep.search import run
from simbal.sweep.search.storage import DamagedStudyError, StudyStorage
from tests.sweep.search.in_process import KEY, SearchHere, results

JOURNAL = "journal:s.log"


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search of trials of two seeds each, three unless told otherwise; the table is not what is tested here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "report", lambda *_: None)
    return SearchHere(tmp_path)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The folder of one that is done, and the runs that it has launched: to be copied."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(run, "report", lambda *_: None)
        search = SearchHere(folder)
        search.run()
    return folder, search.launcher.launched


@pytest.fixture
def done(searched, search):
    folder, launched = searched
    shutil.copytree(folder, search.folder, dirs_exist_ok=True)
    search.launcher.launched = [*launched]
    return search


def change(search, *statements):
    with closing(sqlite3.connect(search.study_file)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE trial_values SET value = 1.5 WHERE trial_id = 2", "trial 1 has val/ppl 1.5, the mean of its replicat"),
        ("UPDATE trial_values SET value_type = 'SOME'", "'SOME' is not among the defined enum values"),
        ("UPDATE trial_values SET objective = 7 WHERE trial_id = 1", "IndexError: list assignment index out of range"),
        ("UPDATE trials SET state = 'DONE' WHERE trial_id = 1", "'DONE' is not among the defined enum values"),
        ("UPDATE trials SET state = 'FAIL' WHERE trial_id = 1", "trial 0: values should be None for a failed trial"),
        ("UPDATE trials SET number = 5 WHERE trial_id = 1", "trial 0 is missing"),
        ("UPDATE trials SET datetime_start = 'noon' WHERE trial_id = 1", "'noon'"),
        ("DELETE FROM trials WHERE trial_id = 1", "a row of trial_"),
        ("DELETE FROM trial_params WHERE trial_id = 2", f"trial 1 has no {KEY}"),
        ("DELETE FROM trial_values WHERE trial_id = 2", "trial 1: values should be set for a complete trial"),
        ("DELETE FROM trial_user_attributes WHERE key = 'runs'", "trial 0 does not name its runs"),
        ("DELETE FROM study_user_attributes WHERE key = 'space'", "its search space are missing"),
        ("DELETE FROM study_directions", "it has no directions"),
        ("DELETE FROM studies", "belongs to none of studies"),
        ("UPDATE trial_user_attributes SET value_json = '{\"a'", "Unterminated string starting at"),
        ("UPDATE trial_user_attributes SET value_json = '7' WHERE key = 'runs'", "runs of trial 0 is not a list of"),
        ("UPDATE trial_user_attributes SET value_json = '[[\"x\"]]' WHERE key = 'replicates'", "replicates of trial 0"),
        (f"UPDATE trial_user_attributes SET value_json = '{'[' * 200_000}'", "maximum recursion depth exceeded"),
        (f"UPDATE trial_user_attributes SET value_json = '\"{'x' * 200_000}\"' WHERE key = 'host'", "host of trial 0"),
        ("UPDATE study_user_attributes SET value_json = '7' WHERE key = 'space'", "TypeError"),
        ("UPDATE trial_params SET distribution_json = '{}'", "KeyError: '"),
        ("UPDATE trial_params SET param_name = 'model.top_k' WHERE trial_id = 3", "which is not what is searched"),
        ("UPDATE trial_params SET param_value = 50 WHERE trial_id = 3", "isn't contained in the distribution"),
        ("UPDATE trial_params SET param_value = 0.5 WHERE trial_id = 3", "trial 2 has balancing.simbal.coef=0.5, outp"),
        ("DROP TABLE trial_values", "trial 0: values should be set for a complete trial"),
        ("CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM studies; END", "it has a trigger, which no study"),
    ],
)
def test_damaged_rows_are_one_sentence_that_names_the_study_and_the_way_out(done, statement, reason):
    change(done, statement)
    with pytest.raises(DamagedStudyError) as error:
        done.run()
    said = str(error.value)
    assert said.startswith("the study s in sqlite:///outputs/s/study.db is damaged (")
    assert reason in said
    assert said.endswith(
        "hydra.sweeper.take_over=true keeps the file as study.db.damaged and rebuilds the study from its runs' folders"
    )
    assert len(said) < 600
    with pytest.raises(DamagedStudyError):
        done.run("dry_run=true")


def test_flipped_bytes_are_a_sentence_or_change_nothing_of_the_trials(done):
    whole, before = done.study_file.read_bytes(), results(done.study())
    choice, found = random.Random(0), 0
    for _ in range(30):
        place = choice.randrange(len(whole))
        flipped = bytes([whole[place] ^ 1 << choice.randrange(8)])
        done.study_file.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        try:
            done.run("dry_run=true")
        except UserError:
            found += 1
        else:
            assert results(done.study()) == before, place
    assert found


@pytest.mark.parametrize("size", [0.3, 0.6, 0.99])
def test_a_file_that_was_cut_short_is_a_sentence_and_can_be_rebuilt(done, size):
    before = results(done.study())
    os.truncate(done.study_file, int(done.study_file.stat().st_size * size))
    with pytest.raises(UserError, match="sqlite:///outputs/s/study.db"):
        done.run()
    done.run(take_over=True)
    assert results(done.study()) == before


def test_a_value_that_was_changed_together_with_its_replicates_is_found_by_the_record_of_the_run(done):
    change(
        done,
        "UPDATE trial_values SET value = 1.0 WHERE trial_id = 2",
        "UPDATE trial_user_attributes SET value_json = '[[1.0], [1.0]]' WHERE key = 'replicates' AND trial_id = 2",
    )
    run = done.study().trials[1].user_attrs["runs"][0]
    said = rf"trial 1 has val/ppl 1\.0; {run} says: val/ppl 10\d\.\d+\)"
    with pytest.raises(DamagedStudyError, match=said):
        done.run()


def test_a_complete_trial_whose_run_has_failed_by_its_record_is_damage(done):
    folder = RunFolder(done.launcher.launched[0])
    folder.write_record({**(folder.read_record() or {}), "status": "failed", "error": "out of memory"})
    with pytest.raises(DamagedStudyError, match="says: out of memory"):
        done.run()
    assert "rebuilt 2 complete trials from the folders of their runs, 1 fail" in done.run(take_over=True)


def test_folders_that_were_deleted_are_no_damage_and_are_counted(done):
    shutil.rmtree(done.launcher.launched[0])
    assert "3 of 3 trials done; 1 folders of its runs are not here, so that their values were not" in done.run()


def test_a_rebuilt_study_goes_on_with_the_points_of_an_undisturbed_one(done, tmp_path, monkeypatch):
    before = results(done.study())
    change(done, "UPDATE trial_values SET value = 1.5 WHERE trial_id = 2")
    said = done.run(n_trials=5, take_over=True)
    assert "is damaged (trial 1 has val/ppl 1.5, the mean of its replicates is val/ppl 101.30" in said
    assert "study s: rebuilt 3 complete trials from the folders of their runs\n" in said
    assert "the damaged file is kept as outputs/s/study.db.damaged\n" in said
    assert "3 of 5 trials done, 2 to run" in said
    assert results(done.study())[:3] == before
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = SearchHere(tmp_path / "whole")
    whole.run(n_trials=5)
    assert results(done.study()) == results(whole.study())
    with closing(sqlite3.connect(f"{done.study_file}.damaged")) as kept:
        assert (1.5,) in kept.execute("SELECT value FROM trial_values").fetchall()


def test_damaged_files_are_numbered_and_what_sqlite_keeps_beside_them_goes_along(done):
    for _ in range(2):
        change(done, "UPDATE trial_values SET value = 1.5 WHERE trial_id = 2")
        done.run(take_over=True)
    done.study_file.write_bytes(b"this is no study\n" * 100)
    done.study_file.with_name("study.db-wal").write_bytes(b"nor is this")
    done.run(take_over=True)
    names = {file.name for file in done.study_file.parent.glob("study.db*")}
    assert names >= {"study.db", "study.db.damaged", "study.db.damaged1", "study.db.damaged2", "study.db.damaged2-wal"}
    assert not names & {"study.db-wal", "study.db.rebuilt"}


def test_failed_points_stay_failed_and_broken_off_ones_are_queued_again(search):
    search.launcher.statuses = {3: "failed", 4: None}
    search.run(n_trials=2, max_failure_rate=1.0)
    before = [trial.params for trial in search.study().trials]
    search.study_file.write_bytes(b"x" * 5000)
    said = search.run(n_trials=3, take_over=True, max_failure_rate=1.0)
    assert "rebuilt 2 complete trials from the folders of their runs, 1 fail, 1 queued" in said
    trials = search.study().trials
    assert [trial.params for trial in trials] == [before[0], before[1], before[3], before[2]]
    assert trials[1].user_attrs["error"] == "seed=1 RuntimeError: the loss is nan"
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) == 3


def test_choices_whole_numbers_and_options_are_found_in_the_configs(search):
    search.lines = ["data=synthetic", "seed=0", "balancing=simbal,[simbal,lbl]", "model.top_k=interval(1,4)"]
    search.lines += ["optim.lr=1e-2,1e-3", "balancing.simbal.coef=0.5"]
    search.run(n_trials=6)
    before = results(search.study())
    search.study_file.write_bytes(b"x" * 5000)
    search.run(n_trials=6, take_over=True)
    assert results(search.study()) == before


def test_runs_of_another_search_do_not_become_trials(done):
    done.lines[1] = f"{KEY}=tag(log,interval(1e-3,1))"  # the first trial lies outside
    outside = sum(trial.params[KEY] > 1 for trial in done.study().trials)
    assert 0 < outside < 3
    done.study_file.write_bytes(b"x" * 5000)
    assert f"rebuilt {3 - outside} complete trials" in done.run(take_over=True)
    done.study_file.write_bytes(b"x" * 5000)
    assert "rebuilt 0 complete trials" in done.run("optim.lr=6e-4", take_over=True)


def test_another_study_of_the_same_file_that_is_being_run_forbids_it(done):
    change(done, "UPDATE trial_values SET value = 1.5")
    before = done.study_file.read_bytes()
    other = StudyStorage.in_file(done.study_file).lock_file("another")
    said = "another study in sqlite:///outputs/s/study.db is being run by process"
    with Lock(other).held(), pytest.raises(BusyError, match=said):
        done.run(take_over=True)
    assert done.study_file.read_bytes() == before


def test_a_flipped_byte_within_a_journal_is_a_sentence_and_can_be_rebuilt(search):
    search.run(storage=JOURNAL)
    file = search.folder / "s.log"
    storage = lambda: optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))  # noqa: E731
    before, whole = results(search.study(storage())), file.read_bytes()
    place = whole.index(b'"values":[') - 3
    file.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    with pytest.raises(DamagedStudyError, match=r"^the study s in journal:s\.log is damaged \(UnicodeDecodeError: "):
        search.run(storage=JOURNAL)
    assert "rebuilt 3 complete trials" in search.run(storage=JOURNAL, take_over=True)
    assert results(search.study(storage())) == before
    place = whole.index(b'"values":[') + 10
    file.write_bytes(whole[:place] + b"7" + whole[place + 1 :])
    with pytest.raises(DamagedStudyError, match="trial 0 has val/ppl 7"):
        search.run(storage=JOURNAL)


def test_a_foreign_line_of_a_journal_is_a_sentence(search):
    search.run(storage=JOURNAL)
    file = search.folder / "s.log"
    whole = file.read_text()
    for line in ("[]", '{"op_code": 99}', '{"op_code": 4, "study_id": 0}', "\0" * 50):
        file.write_text(f"{whole}{line}\n")
        with pytest.raises(DamagedStudyError, match=r"journal:s\.log is damaged"):
            search.run(storage=JOURNAL)
