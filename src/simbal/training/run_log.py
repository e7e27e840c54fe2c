"""The log of a run, train.log."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("simbal")


class _RunLog(logging.FileHandler):
    """Loses lines where the disk is full; Python would print a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append to `file` what this package logs, and what threads of other packages die of: who needs them says so."""
    handler = _RunLog(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.disabled = False  # Hydra disables every logger that is there when it starts a job, as in a forked process
    before, threading.excepthook = threading.excepthook, _log_end_of_thread
    try:
        yield
    finally:
        threading.excepthook = before
        log.removeHandler(handler)
        handler.close()


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None:
        log.error("a thread has ended", exc_info=(end.exc_type, end.exc_value, end.exc_traceback))
