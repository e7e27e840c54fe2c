"""What goes wrong on a Ray cluster: a node, the head or a process of Ray's is lost while jobs run."""

import os
import signal
from contextlib import suppress
from random import Random

from tests.chaos.scene import END_SECONDS, Scene, parent, said

GIVEN_UP_SECONDS = 60.0  # until Ray's other processes end without a head


def lose_node(kind: str, scene: Scene, draws: Random) -> None:
    """Take a node away from a running sweep, and add another later, so that there are as many as before."""
    if not scene.running() or scene.cluster is None:
        return
    seconds = draws.uniform(0.0, 5.0)
    scene.cluster.lose_node()
    scene.note(kind, f"there is another one after {seconds:.1f} s")
    scene.wait(seconds)
    scene.cluster.add_node()


def kill_ray_worker(kind: str, scene: Scene, draws: Random) -> None:
    """Kill the process of Ray that has started a job: the job ends with it, and Ray starts another."""
    workers = {
        worker: run for pid, run in scene.jobs().items() if said(worker := parent(pid), "cmdline")[:5] == "ray::"
    }
    if not workers:
        return
    worker = draws.choice(sorted(workers))
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
        scene.note(kind, f"process {worker}, of {workers[worker]}")


def lose_head(kind: str, scene: Scene, draws: Random) -> None:
    """Take the head away from a running sweep, which ends by it, and make a new cluster for the next."""
    if not scene.running() or scene.cluster is None:
        return
    scene.note(kind, f"of {scene.cluster.address}")
    scene.cluster.lose_head()
    scene.await_end(scene.running(), GIVEN_UP_SECONDS + END_SECONDS)
    scene.cluster.stop()
    scene.cluster.start()
