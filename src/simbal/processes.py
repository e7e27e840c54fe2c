"""Processes of jobs: their slots, how they start, and how they end together with the process that started them.

A job starts in a new Python, or in a fork of a server that has imported its libraries: importing torch and Lightning
takes 3 s of CPU time. Either way it leads a process group, which Ctrl-C in a terminal does not reach.
"""

import atexit
import ctypes
import importlib.metadata
import json
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from simbal.errors import UserError

Task = dict[str, Any]  # input of a job's process, as JSON values
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS, WATCH_SECONDS = 0.1, 0.5
GRACE_SECONDS = 5.0  # between SIGTERM, on which a run saves a checkpoint, and SIGKILL
START_ATTEMPTS, RETRY_SECONDS = 5, 0.2  # retries if the fork server dies while it starts a process
# parameters and values of mallopt(3) in bytes: never shrink the heap; map only blocks of at least 1 GiB
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 2**31 - 1), (-3, 2**30)
M_TOP_PAD, MADV_HUGEPAGE = -2, 14  # a parameter of mallopt(3) and an advice of madvise(2)
HUGE_PAGE, HEAP_GROWTH = 2**21, 2**31 - 2**21  # bytes; of address space, not of memory


def cpu_slots(cores: int, n_jobs: int | None, threads: int | None) -> list[dict[str, str]]:
    """Return the environment of each slot: one per core or `n_jobs`, with one thread or `threads`.

    The number of threads is fixed, so that floating-point sums do not depend on the machine.
    """
    _require_positive(n_jobs=n_jobs, threads=threads)
    environment = dict.fromkeys(THREADS, str(threads or 1))
    return [environment] * (n_jobs or max(1, cores // (threads or 1)))


def gpu_slots(
    visible: Sequence[str], gpus: Sequence[str] | None, n_jobs: int | None, threads: int | None
) -> list[dict[str, str]]:
    """Return the environment of each slot: one per visible GPU, or `n_jobs`, where several may share a GPU.

    Args:
        visible: the GPUs that the sweep may use, as in CUDA_VISIBLE_DEVICES.
        gpus: positions in `visible`, one entry per slot: `[0,1]`, or `[0+1,2+3]` for two GPUs per job; None: all.
        n_jobs: the number of slots; None: one per entry of `gpus` or visible GPU.
        threads: threads of the libraries in each job; None: the libraries' choice.

    Raises:
        UserError: `gpus` names a GPU that is not visible.
    """
    _require_positive(n_jobs=n_jobs, threads=threads)
    by_position = {str(position): name for position, name in enumerate(visible)}
    try:
        slots = [",".join(by_position[number] for number in slot.split("+")) for slot in gpus or by_position]
    except KeyError as missing:
        allowed = f"0 to {len(visible) - 1}" if visible else "none, as no GPU is visible"
        raise UserError(f"hydra.launcher.gpus: {missing.args[0]} is not a GPU; allowed: {allowed}") from None
    environment = dict.fromkeys(THREADS, str(threads)) if threads else {}
    return [{VISIBLE: slots[number % len(slots)], **environment} for number in range(n_jobs or len(slots))]


def remote_slots(max_jobs: int, n_jobs: int | None, threads: int | None, on_gpus: bool) -> list[dict[str, str]]:
    """Return the environment of each slot on a cluster, `n_jobs` or `max_jobs`; the cluster assigns GPUs."""
    environment = cpu_slots(1, 1, threads)[0] if threads or not on_gpus else {}
    _require_positive(n_jobs=n_jobs)
    return [environment] * (n_jobs or max_jobs)


def _require_positive(**counts: int | None) -> None:
    for key, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"hydra.launcher.{key}={count} must be null or at least 1")


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a job can use, without importing torch; none for a CPU build of torch."""
    present = [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]
    if importlib.metadata.version("torch").endswith("+cpu") or not present:
        return []
    chosen = environment.get(VISIBLE, ",".join(present)).split(",")
    return [name.strip() for name in chosen if name.strip() not in ("", "-1")]


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process can use, given its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, period = quota.read_text().split()
        return max(1, min(cores, math.ceil(int(microseconds) / int(period))))
    except (OSError, ValueError):  # no cgroup, or the quota is "max"
        return cores


class Process(Protocol):
    """A started process, on this machine or another."""

    def begun(self) -> bool:
        """Return whether the process is running; a cluster can queue it for hours, and again after a preemption."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs; a negative code is the signal that killed it."""

    def wait(self) -> int:
        """Wait for the process to end and return its exit code."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its descendants, even after the process has ended."""


class LocalProcess:
    """A process on this machine that leads a process group."""

    def __init__(self, process: "subprocess.Popen[bytes] | ForkServerProcess") -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    def begun(self) -> bool:
        """Return True, because a local process starts immediately."""
        return True

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs; a negative code is the signal that killed it."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def wait(self) -> int:
        """Wait for the process to end and return its exit code."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        if self.poll() is None:  # a fork that does not lead a group yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def stop_processes(processes: Sequence[Process], grace: float = GRACE_SECONDS) -> None:
    """Stop processes and their descendants: SIGTERM, on which runs save, and SIGKILL `grace` seconds later."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)
    for process in processes:
        process.signal(signal.SIGKILL)
        process.wait()


class Starter(Protocol):
    """A way to start a process that does one task."""

    def start(self, task: Task, environment: Mapping[str, str]) -> Process:
        """Start a process with these environment variables."""


class Spawn:
    """Starts each process as a new Python, which imports its own libraries."""

    def __init__(self, program: ModuleType) -> None:
        """Set the module that `python -m` runs; it must get its task from `read_task`."""
        self.program = program

    def start(self, task: Task, environment: Mapping[str, str]) -> LocalProcess:
        """Start a process, which reads its task from standard input."""
        process = subprocess.Popen(
            [sys.executable, "-m", self.program.__name__],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(task).encode())
        return LocalProcess(process)


def read_task() -> Task:
    """Return the task that `Spawn` sent to this process."""
    with sys.stdin.buffer as pipe:
        return dict(json.load(pipe))


class ForkServer:
    """Starts each process as a fork of a server that has imported `preload` and ends with this process."""

    def __init__(self, work: Callable[[Task], int], preload: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server.

        Args:
            work: the function that a forked process calls with its task; it returns the exit code.
            preload: names of modules that the server imports.
            environment: variables that libraries read when they are imported, such as OMP_NUM_THREADS.
        """
        self.work, self.environment = work, dict(environment)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([work.__module__, *preload])
        with _environment(self.environment):
            forkserver.ensure_running()

    def start(self, task: Task, environment: Mapping[str, str]) -> LocalProcess:
        """Fork a process that calls `work` with the task; restart the server if it was killed."""
        for attempt in range(START_ATTEMPTS):
            process = self.context.Process(target=_run_forked, args=(self.work, task, dict(environment)), daemon=False)
            try:
                with _environment(self.environment), _hidden_main():  # a server may be restarted here
                    process.start()
                break
            except (EOFError, ConnectionError):  # the server was killed at this moment
                if attempt == START_ATTEMPTS - 1:
                    raise
                time.sleep(RETRY_SECONDS)
        return LocalProcess(process)


def _run_forked(work: Callable[[Task], int], task: Task, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ |= environment
    try:
        raise SystemExit(work(task))
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep new processes from importing the caller's script, which may start a sweep without a check of `__name__`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def ends_with(parent: int, grace: float = GRACE_SECONDS) -> Iterator[None]:
    """End this process and its group when the process `parent` ends within the block.

    A thread watches `parent`. The kernel's parent-death signal is unsuitable: it is sent when the thread that started
    the process ends, not when the parent process ends.

    Args:
        parent: the id of a process on this machine.
        grace: seconds between SIGTERM, on which a run saves a checkpoint, and SIGKILL; 0: SIGKILL immediately.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(parent, grace, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch(parent: int, grace: float, done: threading.Event) -> None:
    with suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):
            descriptor = os.pidfd_open(parent)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while not done.is_set() and not poll.poll(WATCH_SECONDS * 1000):
                pass
            os.close(descriptor)
        else:  # not Linux
            while not done.wait(WATCH_SECONDS):
                os.kill(parent, 0)
    if grace and not done.is_set():
        _signal_group(signal.SIGTERM)
        done.wait(grace)
    if not done.is_set():
        _signal_group(signal.SIGKILL)


def _signal_group(number: signal.Signals) -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)


@cache  # a forked process inherits the heap
def tune_memory_allocation() -> None:
    """Make glibc keep freed memory for reuse, and use huge pages; call it before the first large tensor.

    glibc returns large blocks to the kernel, which maps and clears their pages again at the next use: 8,600 page faults
    per step with `model=tiny`, a fifth of the step's time on a virtual machine. Huge pages for the heap take another 7%
    to 16% off a step (benchmarks/RESULTS.md). Where the system lacks either, nothing changes.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it when it allocates the first large tensor
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    begin = libc.sbrk(ctypes.c_long(0))
    for parameter, value in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, (M_TOP_PAD, HEAP_GROWTH)):
        libc.mallopt(parameter, value)
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(HEAP_GROWTH // 8))))  # grows the heap by HEAP_GROWTH
    begin, end = (-(-address // HUGE_PAGE) * HUGE_PAGE for address in (begin, libc.sbrk(ctypes.c_long(0))))
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)
    libc.mallopt(M_TOP_PAD, HUGE_PAGE)
