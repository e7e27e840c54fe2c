"""A journal whose last line a kill has cut short goes on behind its last whole line, and loses nothing else."""

import json
import multiprocessing
import threading

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from simbal.sweep.search.storage import open_journal


def plain(file):
    """As another program opens it."""
    return JournalStorage(JournalFileBackend(str(file)))


@pytest.fixture
def journal(tmp_path):
    file = tmp_path / "s.log"
    study = optuna.create_study(study_name="s", storage=plain(file))
    for number in range(3):
        trial = study.ask()
        trial.set_user_attr("number", number)
        study.tell(trial, float(number))
    return file


def test_a_journal_cut_at_any_byte_of_its_last_lines_goes_on_behind_the_last_whole_one(journal):
    content = journal.read_bytes()
    first = len(b"".join(content.splitlines(keepends=True)[:-2]))
    for size in range(first, len(content) + 1):
        journal.write_bytes(content[:size])
        whole = content[:size].rpartition(b"\n")[0] + b"\n"
        study = optuna.load_study(study_name="s", storage=open_journal(journal))
        study.set_user_attr("size", size)
        assert journal.read_bytes().startswith(whole)
        lines = journal.read_bytes()[len(whole) :].splitlines()
        assert [json.loads(line)["user_attr"] for line in lines] == [{"size": size}]
        again = optuna.load_study(study_name="s", storage=plain(journal))
        assert again.user_attrs == {"size": size}
        assert [trial.value for trial in again.trials[:2]] == [0.0, 1.0]
        assert len(again.trials) == 3


def test_zeros_that_a_power_failure_has_left_are_cut_off(journal):
    content = journal.read_bytes()
    journal.write_bytes(content + bytes(100_000))
    optuna.load_study(study_name="s", storage=open_journal(journal)).set_user_attr("a", 1)
    assert journal.read_bytes().startswith(content + b'{"op_code":')


def test_opening_a_journal_alone_changes_nothing(journal):
    journal.write_bytes(journal.read_bytes()[:-5])
    before = journal.read_bytes()
    open_journal(journal)
    assert journal.read_bytes() == before


def test_a_file_without_a_whole_line_that_is_no_journal_is_left_as_it_is(tmp_path):
    file = tmp_path / "thesis"
    file.write_bytes(b"my only copy")
    with pytest.raises(ValueError, match="it is no journal"):
        optuna.create_study(storage=open_journal(file))
    assert file.read_bytes() == b"my only copy"
    assert not (tmp_path / "thesis.lock").is_symlink()


def test_half_a_line_of_a_writer_that_is_still_at_it_is_not_cut_off(journal):
    content, line = journal.read_bytes(), b'{"op_code":2,"worker_id":"w","study_id":0,"user_attr":{"theirs":1}}\n'
    writer = JournalFileSymlinkLock(str(journal))
    writer.acquire()
    journal.write_bytes(content + line[:20])
    study = optuna.load_study(study_name="s", storage=open_journal(journal))
    ours = threading.Thread(target=study.set_user_attr, args=("ours", 1))
    ours.start()
    ours.join(0.2)
    assert journal.read_bytes() == content + line[:20]
    journal.write_bytes(content + line)
    writer.release()
    ours.join()
    assert optuna.load_study(study_name="s", storage=plain(journal)).user_attrs == {"theirs": 1, "ours": 1}


def _append(file, name, opened):
    study = optuna.load_study(study_name="s", storage=opened(file))
    for number in range(30):
        study.set_user_attr(f"{name} {number}", number)


def test_what_two_processes_append_at_once_behind_half_a_line_is_all_there(journal):
    journal.write_bytes(journal.read_bytes() + b'{"op_code":2,"wor')
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(_append, [(journal, "a", open_journal), (journal, "b", open_journal)])
    assert len(optuna.load_study(study_name="s", storage=plain(journal)).user_attrs) == 60
