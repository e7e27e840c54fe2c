"""train.log holds what the package says and what threads die of, and never disturbs a run."""

import logging
import threading

from simbal.training.run import log_to

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
