"""Starts the processes that train one model together, shares why one of them failed, and leaves none behind.

The first rank is the process that was asked to train; it starts the others afresh, in its own process group. Under
torchrun, or srun of Slurm, all of them are there already. Lightning's launcher would run the whole command line again
for each.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Concatenate

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.distributed import Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from simbal.errors import UserError
from simbal.processes.slots import usable_cores
from simbal.processes.watchdog import ends_with

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=30)  # for which a rank waits for another, as while that one saves
GRACE_SECONDS = 30.0  # after a rank's end, until the first one ends too
BACKENDS = "cpu:gloo,cuda:nccl"
KEY = "simbal/failure"
WAIT_SECONDS = 20.0  # for a report: the connection to a killed rank breaks seconds before its process ends
LOOK_SECONDS = 0.1  # between two looks for it: a wait of the store would keep this process's own threads from reporting


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model together, as the process `rank` of `size` sees them; alone it has no store.

    Once `parted` is set, this rank waits for no other any more, and may take its time.
    """

    rank: int = 0
    size: int = 1
    store: Store | None = None
    parted: threading.Event = field(default_factory=threading.Event)

    def report_failure(self, failure: str) -> None:
        """Store why this rank has failed, unless another rank has reported a failure before."""
        if self.store is not None:
            with suppress(RuntimeError):  # the first rank, and with it the store, may be gone
                self.store.compare_set(KEY, "", failure)

    def failure_of_others(self) -> str | None:
        """Return the failure that another rank has reported, or None if none does so within `WAIT_SECONDS`."""
        deadline = time.monotonic() + WAIT_SECONDS
        with suppress(RuntimeError):  # a launcher's store may be gone
            while self.store is not None and time.monotonic() < deadline:
                if self.store.check([KEY]):
                    return str(self.store.get(KEY).decode())
                time.sleep(LOOK_SECONDS)
        return None


@dataclass(frozen=True)
class Launched:
    """One of the processes that torchrun or srun has started to train one model together."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int  # processes on this machine
    meeting: str  # the URL of torch's rendezvous


def launched() -> Launched | None:
    """Return what torchrun or srun says of this process; None unless one of them has started it as a rank."""
    environment = os.environ
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return Launched("torchrun", rank, size, rank % local_size, local_size, "env://")
    return _task_of_srun(environment)


def _task_of_srun(environment: Mapping[str, str]) -> Launched | None:
    """Return the rank that is a task among several of a step; a script of sbatch or an interactive shell is none."""
    size = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if size == 1 or "SLURM_PTY_PORT" in environment:
        return None
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    first_node = SLURMEnvironment.resolve_root_node_address(environment["SLURM_STEP_NODELIST"])
    host = environment.get("MASTER_ADDR", first_node)
    port = environment.get("MASTER_PORT", 12000 + (100 * job + step) % 20000)  # below those that systems give away
    neighbours = environment["SLURM_GTIDS"].split(",")
    rank, local_rank = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
    return Launched("srun", rank, size, local_rank, len(neighbours), f"tcp://{host}:{port}")


def local_devices(devices: int) -> int:
    """Return how many of a run's devices this machine has: all, unless a launcher has started ranks on several."""
    here = launched()
    return here.local_size if here else devices


def together(work: Callable[Concatenate[Ranks, ...], None], arguments: tuple[Any, ...], devices: int) -> None:
    """Call `work(ranks, *arguments)` on `devices` ranks that can reach each other; this process is one of them.

    Args:
        work: a function of a module, as the other ranks are new processes.
        arguments: its further arguments, which can be pickled.
        devices: the number of ranks.

    Raises:
        UserError: torchrun or srun has started another number of processes.
    """
    if here := launched():
        _under_launcher(here, work, arguments, devices)
    elif devices == 1:
        work(Ranks(), *arguments)
    else:
        _with_others(work, arguments, devices)


def _under_launcher(here: Launched, work: Callable[..., None], arguments: tuple[Any, ...], devices: int) -> None:
    if here.size != devices:
        raise UserError(
            f"{here.launcher} has started {here.size} processes, but trainer.devices={devices}: make them equal"
        )
    store, rank, size = next(rendezvous(here.meeting, here.rank, here.size, timeout=TIMEOUT))
    with _joined(Ranks(rank, size, store)) as ranks, _silent() if rank else nullcontext():
        work(ranks, *arguments)


def _with_others(work: Callable[..., None], arguments: tuple[Any, ...], devices: int) -> None:
    store = TCPStore(HOST, 0, devices, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    ranks = Ranks(0, devices, store)
    context = get_context("spawn")
    others: list[SpawnProcess] = []
    watcher = threading.Thread(target=_watch, args=(others, ranks), daemon=True)
    try:
        for rank in range(1, devices):
            settings = (rank, devices, store.port, os.getpid(), work, arguments)
            others.append(context.Process(target=_other_rank, args=settings, daemon=True))
            others[-1].start()
        watcher.start()
        with _joined(ranks):
            work(ranks, *arguments)
        for process in others:
            process.join(GRACE_SECONDS)
    finally:
        ranks.parted.set()
        started = [process for process in others if process.pid is not None]
        for process in started:
            process.kill()  # nobody waits for what it does now; the first rank's files are the run's
        if watcher.ident is not None:
            watcher.join()  # if two wait for a process, one may miss its end
        for process in started:
            process.join()


def _other_rank(
    rank: int, devices: int, port: int, first: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Be a rank in a process that the first rank has started, whose process id is `first`."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the first rank knows whether they are for it
    store = TCPStore(HOST, port, devices, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    try:
        with ends_with(first, grace=0), _silent(), _joined(Ranks(rank, devices, store)) as ranks:
            work(ranks, *arguments)
    except (UserError, KeyboardInterrupt):  # the first rank says so
        raise SystemExit(1) from None
    except Exception:
        print(f"rank {rank}:", file=sys.stderr)
        traceback.print_exc()
        raise SystemExit(1) from None


def _watch(others: list[SpawnProcess], ranks: Ranks) -> None:
    """End this process if another rank has died and this one waits for it in vain, as NCCL would for long."""
    alive = {process.sentinel: process for process in others}
    while alive and not ranks.parted.is_set():
        for sentinel in connection.wait([*alive], timeout=1.0):
            process = alive.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                error = f"the process of rank {others.index(process) + 1} has {_ended(process.exitcode)}"
                ranks.report_failure(error)
                if not ranks.parted.wait(GRACE_SECONDS):
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    os._exit(1)


def _ended(exit_code: int) -> str:
    return f"been killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


@contextmanager
def _joined(ranks: Ranks) -> Iterator[Ranks]:
    """Make this process a rank of torch's process group within the block, and yield `ranks`."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // local_devices(ranks.size)))
    if launched() is None and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may lead nowhere
    backend = BACKENDS if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=ranks.store, rank=ranks.rank, world_size=ranks.size, timeout=TIMEOUT)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


@contextmanager
def _silent() -> Iterator[None]:
    """Print nothing within the block, as every rank would print the same."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
