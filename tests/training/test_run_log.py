"""train.log holds what the package says and what threads die of, and never disturbs a run."""

import logging
import threading

import pytest

from simbal.errors import UserError
from simbal.training.run import log_to, train

log = logging.getLogger("simbal")


def test_the_end_of_a_librarys_thread_is_logged_and_not_printed(tmp_path, capsys):
    hook = threading.excepthook
    with log_to(tmp_path / "train.log"):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    assert threading.excepthook is hook
    assert "ZeroDivisionError" in (tmp_path / "train.log").read_text()
    assert capsys.readouterr().err == ""


def test_a_run_follows_no_link_out_of_its_folder(small_spec, tmp_path):
    spec, victim = small_spec(), tmp_path / "victim"
    spec.path.mkdir(parents=True)
    (spec.path / "train.log").symlink_to(victim)
    with pytest.raises(UserError, match="train.log is a link, a pipe or a device"):
        train(spec)
    assert not victim.exists()
    assert not (spec.path / "record.json").exists()
