"""Jobs as tasks of a Ray cluster: a node receives the folder of a run, and trains the run in a separate process."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayError, TaskCancelledError, WorkerCrashedError

from simbal.errors import UserError
from simbal.processes import POLL_SECONDS, Spawn, Task, stop_processes
from simbal.runs.folder import CONSOLE_FILE
from simbal.sweeping import worker

CONNECT_SECONDS = 5.0
# Ray speaks gRPC: its server answers a client's preface and empty SETTINGS frame with a SETTINGS frame (RFC 9113)
SETTINGS = b"\x04"
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
CANCEL_SECONDS = 15.0  # until a task is cancelled again: Python may drop the exception that Ray raises in a worker
LOST = (TaskCancelledError, WorkerCrashedError, NodeDiedError)  # the next sweep resumes these runs


def connect(address: str | None) -> None:
    """Connect to the cluster at `address` unless connected. Without an address, start one on this machine.

    Raises:
        UserError: no cluster answers at the address.
    """
    if ray.is_initialized():
        return
    try:
        if address and ":" in address:  # Ray itself would retry for minutes
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), CONNECT_SECONDS) as connection:
                connection.sendall(HTTP2_HELLO)
                if connection.recv(9)[3:4] != SETTINGS:
                    raise ValueError("the port belongs to another program")
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"hydra.launcher.address={address}: no Ray cluster answers ({reason})") from None


def count_slots(num_cpus: float, num_gpus: float) -> int:
    """Return how many jobs with these resources all nodes together can run at once.

    Raises:
        UserError: a job requests no resources, or more than any node has.
    """
    resources = {"CPU": num_cpus, "GPU": num_gpus}
    if min(resources.values()) < 0 or not any(resources.values()):
        raise UserError(
            f"hydra.launcher.num_cpus={num_cpus:g} and hydra.launcher.num_gpus={num_gpus:g} must be at least 0, and "
            "one of them greater than 0"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    slots = sum(min(int(node.get(kind, 0) // n) for kind, n in resources.items() if n) for node in nodes)
    if not slots:
        raise UserError(
            f"no node of the Ray cluster has {num_cpus:g} CPUs and {num_gpus:g} GPUs for a job: change "
            "hydra.launcher.num_cpus, hydra.launcher.num_gpus or trainer.devices"
        )
    return slots


class RayStarter:
    """Start each job as a task of Ray."""

    def __init__(self, num_cpus: float, num_gpus: float, max_retries: int) -> None:
        """Take the resources of a job, and how often it is retried on another node if its node or worker is lost."""
        on_node = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=max_retries)
        self.remote = on_node(_work_in_process)

    def start(self, task: Task, environment: Mapping[str, str]) -> "RayTask":
        """Submit a task. It starts when a node has room for it."""
        console = Path(task["folder"], CONSOLE_FILE)
        before = _modified(console)
        return RayTask(self.remote.remote(task, dict(environment)), lambda: _modified(console) != before)


class RayTask:
    """The process of a task on any node."""

    def __init__(self, reference: Any, begun: Callable[[], bool]) -> None:
        """Take Ray's reference to the result. Ray does not report whether a task has `begun`."""
        self.reference, self.future, self.begun = reference, reference.future(), begun
        self.cancelled: float | None = None  # the time of the last cancellation

    def poll(self) -> int | None:
        """Return None while the task waits or runs, then its exit code; -9 if its process is lost.

        Raises:
            UserError: the node cannot run the task.
        """
        if not self.future.done():
            if self.cancelled is not None and time.monotonic() > self.cancelled + CANCEL_SECONDS:
                self._cancel()
            return None
        try:
            return int(self.future.result())
        except LOST:
            return -signal.SIGKILL
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"a node of the Ray cluster cannot run a job: {reason}") from None

    def wait(self) -> int:
        """Wait for the end of the task, and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Cancel the task on SIGTERM. Its node lets the process save, then kills it with all of its children.

        SIGKILL is ignored: Ray would kill the worker and the process, but not the children of the process.
        """
        if number == signal.SIGTERM and not self.future.done():
            self._cancel()

    def _cancel(self) -> None:
        ray.cancel(self.reference)
        self.cancelled = time.monotonic()


def _modified(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _work_in_process(task: Task, environment: dict[str, str]) -> int:
    """Train a run in a separate process, so that a crash does not end Ray's worker.

    The process also ends with the raylet, the worker's parent: if the head is lost, Ray leaves busy workers behind.
    """
    # a cluster that was started in the background ignores SIGINT, with which Ray cancels a task
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raylet, process = os.getppid(), Spawn(worker).start(task | {"sweep": os.getpid()}, environment)
    try:
        while process.poll() is None and os.getppid() == raylet:  # Ray cannot interrupt a blocking wait
            time.sleep(POLL_SECONDS)
    finally:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the next cancellation would interrupt this
        stop_processes([process])
        signal.signal(signal.SIGINT, previous)
    if os.getppid() != raylet:
        os._exit(1)  # a worker returns a result even without its node, and the run would count as stopped by SIGTERM
    return process.wait()
