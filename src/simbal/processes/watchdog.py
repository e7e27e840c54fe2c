"""A watchdog that ends a process with the one it works for, so that a killed sweep or rank leaves nothing running."""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

POLL_SECONDS, GRACE_SECONDS = 0.5, 5.0


@contextmanager
def ends_with(process: int, grace: float = GRACE_SECONDS) -> Iterator[None]:
    """End this process when `process`, another one on this machine, ends within the `with` block.

    Its group ends too if it leads one, and with it all that it has started. The kernel's signal for this would not do:
    it comes when the thread ends that has made a process, of which there may be several.

    Args:
        process: the id of the other process.
        grace: seconds between SIGTERM, at which a run saves, and SIGKILL; 0: SIGKILL at once.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(process, grace, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch(process: int, grace: float, done: threading.Event) -> None:
    if not _outlives(process, done):
        return
    if grace:
        _signal(signal.SIGTERM)
        if done.wait(grace):
            return
    _signal(signal.SIGKILL)


def _outlives(process: int, done: threading.Event) -> bool:
    """Wait until `process` has ended, and return True; return False if `done` is set before."""
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):  # outside Linux
            while not done.wait(POLL_SECONDS):
                os.kill(process, 0)
            return False
        end = os.pidfd_open(process)
        try:
            waiting = select.poll()
            waiting.register(end, select.POLLIN)
            while not waiting.poll(POLL_SECONDS * 1000):
                if done.is_set():
                    return False
        finally:
            os.close(end)
    return not done.is_set()


def _signal(number: signal.Signals) -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)
