"""train.log holds what the package says and what threads die of, and never disturbs a run."""

import logging
import resource
import threading
from contextlib import contextmanager

from simbal.runs.folder import RunFolder
from simbal.training.run import log_to

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


def test_a_folder_can_be_locked_on_a_full_disk(tmp_path):
    folder = RunFolder(tmp_path)
    with no_file_may_grow(), folder.lock():
        assert folder.looks_busy()
    assert not folder.looks_busy()
