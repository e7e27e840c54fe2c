"""Sweeps on a local Ray cluster of two nodes: jobs fail, a node is lost, and a sweep is stopped."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from simbal.errors import UserError
from simbal.sweeping.ray_tasks import connect, count_slots
from tests.sweep.conftest import OUR_PATH, PRETENDING

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 600.0  # however slow the machine
NODES = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": gpus}} for gpus in (0.0, 2.0)]


def test_slots_are_the_jobs_that_fit_on_all_nodes():
    with mock.patch("ray.nodes", return_value=NODES):
        assert [count_slots(*resources) for resources in ((1, 0), (3, 0), (1, 1), (0, 0.5))] == [8, 2, 2, 4]
        with pytest.raises(UserError, match="no node of the Ray cluster has 64 CPUs and 0 GPUs for a job"):
            count_slots(64, 0)
        with pytest.raises(UserError, match="hydra.launcher.num_cpus=0 and hydra.launcher.num_gpus=0 must be at least"):
            count_slots(0, 0)


def test_an_address_without_a_cluster_is_refused():
    with pytest.raises(UserError, match=r"hydra.launcher.address=127.0.0.1:9: no Ray cluster answers"):
        connect("127.0.0.1:9")


def test_a_port_of_another_program_is_refused_within_seconds():
    def answer() -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match="no Ray cluster answers .the port belongs to another program."):
            connect(f"127.0.0.1:{server.getsockname()[1]}")


@contextmanager
def start_cluster(python_path: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `serve_cluster` in a separate process, because tests fork, and a fork would lack the threads of Ray."""
    command = [sys.executable, "-m", __name__, python_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes) as cluster:
        yield cluster


def serve_cluster(python_path: str) -> None:
    """Start two nodes with a CPU each and print the address of the head; lose the other node at the first line."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to the standard output
    node = {"num_cpus": 1, "env_vars": {"PYTHONPATH": python_path}, "wait": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes(START_SECONDS)
    print(cluster.address, file=answers, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.shutdown()


@pytest.mark.slow
def test_failed_jobs_lost_nodes_and_a_stop_lose_no_run(app):
    with start_cluster(os.pathsep.join(filter(None, (PRETENDING, OUR_PATH)))) as cluster:
        address = cluster.stdout.readline().strip()
        ray = ("-m", "hydra/launcher=ray", f"hydra.launcher.address={address}", "trainer.accelerator=cpu")

        app.behave({1: "crash", 2: "die", 3: "locked once"})
        done = app.start(*ray, "seed=0-3").completed()
        assert done.stderr.endswith("2 of 4 jobs failed\n"), done.stderr
        statuses = [app.record(seed)["status"] for seed in range(4)]
        assert statuses == ["finished", "failed", "killed", "finished"]
        assert {job["threads"] for job in app.jobs} == {"1"}

        app.behave({1: "hang", 2: "hang"})  # one on each node
        sweep = app.start(*ray, "seed=0-3", "retry_failed=true")
        app.wait_until(lambda: sweep.poll() is not None or len(app.hanging) == 4)
        print("lose a node", file=cluster.stdin, flush=True)
        children, processes = app.hanging[::2], app.hanging[1::2]
        app.wait_until(lambda: sum(map(app.alive, processes)) == 1)
        # Ray may have killed the process itself, and then not its child; ranks end with their parent
        (orphan,) = (child for child, process in zip(children, processes, strict=True) if not app.alive(process))
        app.behave()
        out, err = sweep.communicate()
        assert sweep.returncode == 0, out + err
        assert out.startswith("2 finished, 2 resumed, 0 new\n")
        assert len(app.started) == 8  # the job of the lost node twice

        app.behave({4: "hang"})
        sweep = app.start(*ray, "seed=4-5")
        app.wait_until(lambda: sweep.poll() is not None or len(app.hanging) == 6)
        sweep.send_signal(signal.SIGINT)
        sweep.communicate()
        assert sweep.returncode == 130
        app.wait_until(lambda: not any(map(app.alive, {*app.hanging} - {orphan})))


if __name__ == "__main__":
    serve_cluster(sys.argv[1])
