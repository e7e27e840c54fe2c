"""The watchdog ends a process with the one that it watches, and all that the process has started."""

import os
import signal
import subprocess
import sys
import time

import pytest

from simbal.processes import watchdog
from tests.child_processes import alive, wait_until

WATCHED = """
import signal, subprocess, sys, time
from simbal.processes.watchdog import ends_with

other, grace, heeds, leaves = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "heeds", sys.argv[4] == "leaves"
if not heeds:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
with ends_with(other, grace):
    time.sleep(0 if leaves else 1000)
print("left", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def other():
    """A process to be watched for its end."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def watched():
    """`watched(pid)`: a process whose watchdog watches `pid`, and the id of the process that it has started."""
    started, children = [], []

    def start(pid, grace=5.0, *, heeds=True, leads=True, leaves=False):
        how = ("heeds" if heeds else "heeds not", "leaves" if leaves else "stays")
        command = [sys.executable, "-c", WATCHED, str(pid), str(grace), *how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=leads))
        children.append(int(started[-1].stdout.readline()))
        return started[-1], children[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for child in filter(alive, children):
        os.kill(child, signal.SIGKILL)


@pytest.fixture(params=["pidfd", "polling"])
def kernel(request, monkeypatch, tmp_path):
    """How the watchdog notes an end: by a pidfd as on Linux, or by polling."""
    if request.param == "polling":
        (tmp_path / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("kernel")
def test_it_ends_with_the_other_one_and_so_does_what_it_has_started(watched, other):
    process, child = watched(other.pid)
    time.sleep(2 * watchdog.POLL_SECONDS)
    assert process.poll() is None
    assert alive(child)
    other.kill()
    other.wait()
    assert process.wait() == -signal.SIGTERM
    wait_until(lambda: not alive(child))


def test_one_that_does_not_heed_sigterm_is_killed_once_its_grace_is_over(watched, other):
    process, child = watched(other.pid, grace=1.0, heeds=False)
    began = time.monotonic()
    other.kill()
    assert process.wait() == -signal.SIGKILL
    assert time.monotonic() - began >= 1.0
    wait_until(lambda: not alive(child))


@pytest.mark.usefixtures("kernel")
def test_a_process_that_has_left_the_block_is_not_ended(watched, other):
    process, child = watched(other.pid, leaves=True)
    assert process.stdout.readline() == "left\n"
    other.kill()
    other.wait()
    time.sleep(3 * watchdog.POLL_SECONDS)
    assert process.poll() is None
    assert alive(child)
