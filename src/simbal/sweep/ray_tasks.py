"""Starts jobs as tasks of a Ray cluster: a node is given a run's folder, and does the run in a process of its own."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayError, TaskCancelledError, WorkerCrashedError

from simbal.errors import UserError
from simbal.processes import POLL_SECONDS, Spawn, Task, stop_processes
from simbal.runs.folder import CONSOLE_FILE
from simbal.sweep import worker

REACHED_SECONDS = 10.0  # until an address has to answer
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL on the node
AGAIN_SECONDS = 15.0  # between cancellations: Ray raises them wherever a worker is, also where Python drops them
LOST = (TaskCancelledError, WorkerCrashedError, NodeDiedError)  # the run goes on by the same command


@dataclass(frozen=True)
class Request:
    """What a job asks of a node: Ray lets it wait until one has as much to spare."""

    num_cpus: float
    num_gpus: float
    max_retries: int  # on another node, of a job whose node or worker is lost


def connect(address: str | None) -> None:
    """Connect to a cluster, once; without an address a cluster of this machine alone is started.

    Raises:
        UserError: there is no cluster at the address.
    """
    if ray.is_initialized():
        return
    try:
        if address and ":" in address:  # Ray itself would try for minutes
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, int(port)), REACHED_SECONDS).close()
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"hydra.launcher.address={address}: no Ray cluster answers there ({said})") from None


def jobs_at_once(request: Request) -> int:
    """Return how many jobs the nodes can do at a time, of which each does them whole.

    Raises:
        UserError: a job asks for nothing, or for more than any node has.
    """
    asked = {"CPU": request.num_cpus, "GPU": request.num_gpus}
    if min(asked.values()) < 0 or not any(asked.values()):
        raise UserError(
            f"hydra.launcher.num_cpus={request.num_cpus:g} and hydra.launcher.num_gpus={request.num_gpus:g} must be at "
            "least 0, and one of them more"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = [min(int(node.get(kind, 0) // amount) for kind, amount in asked.items() if amount) for node in nodes]
    if not sum(fits):
        raise UserError(
            f"no node of the Ray cluster has {request.num_cpus:g} CPUs and {request.num_gpus:g} GPUs for a job: change "
            "hydra.launcher.num_cpus, hydra.launcher.num_gpus or trainer.devices"
        )
    return sum(fits)


class RayStarter:
    """A way to start processes: each belongs to a task of Ray, and ends with it."""

    def __init__(self, request: Request) -> None:
        self.remote = ray.remote(num_cpus=request.num_cpus, num_gpus=request.num_gpus, max_retries=request.max_retries)(
            _work_in_process
        )

    def start(self, task: Task, environment: Mapping[str, str]) -> "RayTask":
        """Hand over a task; it starts when a node has room for it."""
        console = Path(task["folder"], CONSOLE_FILE)
        before = _changed(console)
        return RayTask(self.remote.remote(task, dict(environment)), lambda: _changed(console) != before)


class RayTask:
    """The process of a task, on whichever node."""

    def __init__(self, reference: Any, begun: Callable[[], bool]) -> None:
        """Make it of Ray's reference to its result; Ray does not say whether it has `begun`."""
        self.reference, self.future, self.begun = reference, reference.future(), begun
        self.cancelled: float | None = None  # when it was, last

    def poll(self) -> int | None:
        """Return None while it waits or runs, then its exit code; that of a process that is lost is -9.

        Raises:
            UserError: the node cannot do what it is given.
        """
        if not self.future.done():
            if self.cancelled is not None and time.monotonic() > self.cancelled + AGAIN_SECONDS:
                self._cancel()
            return None
        try:
            return int(self.future.result())
        except LOST:
            return -signal.SIGKILL
        except RayError as error:
            said = str(error).strip().splitlines()[-1]
            raise UserError(f"a node of the Ray cluster cannot do a job: {said}") from None

    def wait(self) -> int:
        """Wait for its end, and return the same."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def signal(self, number: signal.Signals) -> None:
        """End the task at SIGTERM: its process may save, and if it stays its node kills it with all it has started.

        SIGKILL adds nothing: Ray would kill the worker and that process, and leave what the process has started.
        """
        if number == signal.SIGTERM and not self.future.done():
            self._cancel()

    def _cancel(self) -> None:
        ray.cancel(self.reference)
        self.cancelled = time.monotonic()


def _changed(console: Path) -> int | None:
    """Return when a file was last changed, as the process of a job does first; None before there is one."""
    return console.stat().st_mtime_ns if console.exists() else None


def _work_in_process(task: Task, environment: dict[str, str]) -> int:
    """Do the run in a process of its own, whose crash leaves the node's worker alone, and which ends with that.

    It also ends with the node's raylet, the worker's parent: where the head is lost, Ray leaves busy workers behind.
    """
    # a cluster that was started in the background ignores SIGINT, with which Ray cancels what runs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raylet, process = os.getppid(), Spawn(worker).start(task | {"sweep": os.getpid()}, environment)
    try:
        while process.poll() is None and os.getppid() == raylet:  # Ray interrupts Python alone, no wait of the kernel's
            time.sleep(POLL_SECONDS)
    finally:
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # by which Ray would break this off at a next cancellation
        stop_processes([process], GRACE_SECONDS)
        signal.signal(signal.SIGINT, heard)
    if os.getppid() != raylet:
        os._exit(1)  # a worker hands over a result also without its node, and the run would count as ended by SIGTERM
    return process.wait()
