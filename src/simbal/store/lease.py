"""Who has a run in a store: signs of life of the process that has it, and when another may take it over.

No clocks are compared. Who waits for a run sees by its own clock how long its holder has given no sign, so that two
machines may believe in different times. A holder that is merely slow can lose its run by this, and cannot spoil it: see
`history`.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from simbal.store.bucket import UnreachableError
from simbal.store.history import Entry, History

log = logging.getLogger("simbal")
LEASE_SECONDS = 120.0  # without a sign of life, after which a run may be taken over
BEAT_SECONDS = 20.0  # between two signs of life
LOOK_SECONDS = 10.0  # between two looks at a run that another process has
_beating: set[str] = set()  # writers of this process that hold a run
BOOT, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def new_writer() -> str:
    """Return a name that no other process has."""
    return uuid4().hex


def process() -> tuple[int, str]:
    """Return this process's id and where it is valid: a boot of a machine, or a container there; "" if unknown."""
    with suppress(OSError):
        return os.getpid(), f"{BOOT.read_text(encoding='ascii').strip()} {PROCESSES.readlink()}"
    return os.getpid(), ""


def holder() -> str:
    """Return this process's name for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def alive(writer: str) -> str:
    """Return the name of the object that changes as long as the writer lives."""
    return f"alive/{writer}"


class Watch:
    """Watches the holder of a run, from one look to the next."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._sign: tuple[int, bytes | None] | None = None
        self._since = 0.0
        self.moved = False  # whether a sign of life has come since the first look

    def is_held(self, entry: Entry) -> bool:
        """Whether the run of `entry`, the last one, is another process's: it may not be taken over yet."""
        if entry.free or _is_gone(entry):
            return False
        sign = entry.number, self.history.bucket.read(self.history.place(alive(entry.writer)))
        if sign != self._sign:
            self.moved = self._sign is not None
            self._sign, self._since = sign, time.monotonic()
        return time.monotonic() - self._since < LEASE_SECONDS


def _is_gone(entry: Entry) -> bool:
    """Whether the holder was a process of this machine that is no more, or this one, which has let go since."""
    number, place = entry.process
    if not place or place != process()[1]:
        return False
    if number == os.getpid():
        return entry.writer not in _beating
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    return False


@contextmanager
def beating(history: History, writer: str) -> Iterator[None]:
    """Give signs of life within the block, from a thread: training can keep this one busy for long.

    That thread deletes the sign too, after its last one: it would stay for ever.
    """
    ended = threading.Event()
    sign = history.place(alive(writer))

    def beat() -> None:
        count = 0
        while not ended.wait(BEAT_SECONDS):
            count += 1
            try:
                history.bucket.write(sign, str(count).encode())
            except UnreachableError as error:
                log.debug("no sign of life: %s", error)
        if count:
            try:
                history.bucket.delete([sign])
            except UnreachableError as error:
                log.debug("not deleted: %s", error)

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    _beating.add(writer)
    try:
        yield
    finally:
        _beating.discard(writer)
        ended.set()
        thread.join(LEASE_SECONDS)
