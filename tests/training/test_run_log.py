"""train.log holds what the package says and what threads die of, and never disturbs a run."""

import logging
import resource
import threading
from contextlib import contextmanager

import pytest

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.run import log_to, train

log = logging.getLogger("simbal")


@contextmanager
def no_file_may_grow():
    """As on a full disk: every write to a file is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_end_of_a_librarys_thread_is_logged_and_not_printed(tmp_path, capsys):
    hook = threading.excepthook
    with log_to(tmp_path / "train.log"):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    assert threading.excepthook is hook
    assert "ZeroDivisionError" in (tmp_path / "train.log").read_text()
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(tmp_path, capsys):
    with log_to(tmp_path / "train.log"):
        log.info("before")
        with no_file_may_grow():
            log.info("lost")
    with no_file_may_grow(), log_to(tmp_path / "full.log"):
        log.info("lost at the end")
    assert "before" in (tmp_path / "train.log").read_text()
    assert capsys.readouterr().err == ""


def test_a_run_follows_no_link_out_of_its_folder(small_spec, tmp_path):
    spec, victim = small_spec(), tmp_path / "victim"
    spec.path.mkdir(parents=True)
    (spec.path / "train.log").symlink_to(victim)
    with pytest.raises(UserError, match="train.log is a link, a pipe or a device"):
        train(spec)
    assert not victim.exists()
    assert not (spec.path / "record.json").exists()


def test_a_folder_can_be_locked_on_a_full_disk(tmp_path):
    folder = RunFolder(tmp_path)
    with no_file_may_grow(), folder.lock():
        assert folder.looks_busy()
    assert not folder.looks_busy()
