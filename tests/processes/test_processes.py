"""Slots per core or GPU, and forked or spawned processes that end with their parent."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from simbal import processes
from simbal.errors import UserError
from simbal.processes import ForkServer, Spawn
from tests.child_processes import alive, wait_until
from tests.processes import program

REPOSITORY = Path(__file__).parents[2]
WATCHED = """
import signal, subprocess, sys, time
from simbal.processes import ends_with

parent, grace, ignores, leaves = int(sys.argv[1]), float(sys.argv[2]), "ignores" in sys.argv, "leaves" in sys.argv
if ignores:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
with ends_with(parent, grace):
    time.sleep(0 if leaves else 1000)
print("left", flush=True)
time.sleep(1000)
"""


def test_a_machine_without_gpus_has_a_slot_of_one_thread_per_core():
    assert processes.cpu_slots(4, None, None) == [dict.fromkeys(processes.THREADS, "1")] * 4
    assert [len(processes.cpu_slots(cores, None, 4)) for cores in (8, 2)] == [2, 1]
    assert processes.cpu_slots(8, 3, 4) == [dict.fromkeys(processes.THREADS, "4")] * 3
    with pytest.raises(UserError, match="hydra.launcher.n_jobs=0"):
        processes.cpu_slots(8, 0, None)


@pytest.mark.parametrize(
    ("gpus", "n_jobs", "visible"),
    [
        (None, None, ["4", "5", "6", "7"]),
        (None, 6, ["4", "5", "6", "7", "4", "5"]),
        (["1", "3"], None, ["5", "7"]),
        (["0+1", "2+3"], None, ["4,5", "6,7"]),
    ],
)
def test_gpu_slots_are_positions_among_the_visible_gpus(gpus, n_jobs, visible):
    assert [slot[processes.VISIBLE] for slot in processes.gpu_slots("4567", gpus, n_jobs, None)] == visible


@pytest.mark.parametrize("gpus", [["4"], ["0+9"], ["a"]])
def test_a_missing_gpu_is_an_error_with_the_existing_ones(gpus):
    with pytest.raises(UserError, match=r"hydra.launcher.gpus.*0 to 3"):
        processes.gpu_slots("4567", gpus, None, None)


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({}, ["0", "1"]),
        ({processes.VISIBLE: "GPU-8a, GPU-9b"}, ["GPU-8a", "GPU-9b"]),
        ({processes.VISIBLE: ""}, []),
        ({processes.VISIBLE: "-1"}, []),
    ],
)
def test_visible_gpus_are_the_devices_that_are_not_hidden(tmp_path, monkeypatch, environment, visible):
    for device in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / device).touch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    assert processes.visible_gpus(environment, tmp_path) == visible
    assert processes.visible_gpus(environment, tmp_path / "none") == []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert processes.visible_gpus(environment, tmp_path) == []


def test_a_container_with_a_quota_has_fewer_cores(tmp_path):
    quota = tmp_path / "cpu.max"
    unlimited = processes.usable_cores(quota)
    quota.write_text("max 100000\n")
    assert processes.usable_cores(quota) == unlimited
    quota.write_text("50000 100000\n")
    assert processes.usable_cores(quota) == 1


def kill_server():
    """Kill the fork server of this process, if there is one, and return its id; the next use starts another."""
    if pid := forkserver._forkserver._forkserver_pid:
        os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture
def own_server(monkeypatch):
    """A server has the modules of its first user, so other tests neither share theirs nor get ours."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}")
    kill_server()
    yield
    kill_server()


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize("kind", ["spawned", "forked"])
def test_a_process_has_its_task_environment_group_and_exit_code(kind, tmp_path):
    preloaded = kind == "forked"
    starter = ForkServer(program.work, ["decimal"], {"OMP_NUM_THREADS": "1"}) if preloaded else Spawn(program)

    def start(ending):
        return starter.start({"notes": str(tmp_path / str(ending)), "ending": ending}, {"COLOUR": "green"})

    ended, failed, waiting = start(3), start("raise"), start("wait")
    assert ended.wait() == 3 == ended.poll()
    assert (tmp_path / "3").read_text().splitlines() == [f"3 green leader=True decimal={preloaded}", "exited"]
    assert "COLOUR" not in os.environ
    assert failed.wait() == 1
    assert "exited" in (tmp_path / "raise").read_text()
    wait_until((tmp_path / "wait").exists)
    assert waiting.poll() is None
    processes.stop_processes([waiting])
    assert waiting.wait() == -signal.SIGTERM


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize("noticed", [True, False])
def test_a_fork_server_that_was_killed_restarts_with_its_environment(tmp_path, noticed):
    server = ForkServer(program.work, ["decimal"], {"COLOUR": "dark"})
    pid = kill_server()
    if noticed:  # else it may be asked for a process while it dies
        wait_until(lambda: not alive(pid))
    assert server.start({"notes": tmp_path / "notes", "ending": 0}, {}).wait() == 0
    assert "0 dark" in (tmp_path / "notes").read_text()
    assert "COLOUR" not in os.environ


@pytest.fixture
def parent():
    """A process to watch."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def watch():
    """`watch(pid)`: a process that watches `pid`, and the id of its own child."""
    started, children = [], []

    def start(pid, grace=5.0, *options):
        command = [sys.executable, "-c", WATCHED, str(pid), str(grace), *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        children.append(int(started[-1].stdout.readline()))
        return started[-1], children[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for child in filter(alive, children):
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kernel", ["pidfd", "polling"])
def test_a_process_and_its_children_end_with_the_parent_within_the_block(watch, parent, kernel, monkeypatch, tmp_path):
    if kernel == "polling":
        (tmp_path / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (watcher, child), (left, its_child) = watch(parent.pid), watch(parent.pid, 5.0, "leaves")
    assert left.stdout.readline() == "left\n"
    time.sleep(2 * processes.WATCH_SECONDS)
    assert watcher.poll() is None
    assert alive(child)
    parent.kill()
    parent.wait()
    assert watcher.wait() == -signal.SIGTERM
    wait_until(lambda: not alive(child))
    time.sleep(processes.WATCH_SECONDS)
    assert left.poll() is None
    assert alive(its_child)


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(watch, parent):
    watcher, child = watch(parent.pid, 0.5, "ignores")
    began = time.monotonic()
    parent.kill()
    assert watcher.wait() == -signal.SIGKILL
    assert time.monotonic() - began >= 0.5
    wait_until(lambda: not alive(child))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages here")
def test_the_heap_grows_once_and_asks_for_huge_pages():
    program = """
from pathlib import Path
from simbal.processes import tune_memory_allocation

def advised_bytes():
    total = end = begin = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith("[heap]"):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        elif line.startswith("VmFlags:"):
            total += (end - begin) * ("hg" in line.split())
            begin = end
    return total

print(advised_bytes())
for _ in range(2):
    tune_memory_allocation()
    print(advised_bytes())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, first, second = map(int, done.stdout.split())
    assert before == 0
    assert 0.99 * processes.HEAP_GROWTH < first == second < 1.2 * processes.HEAP_GROWTH
