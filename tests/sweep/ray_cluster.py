"""A Ray cluster of several nodes on this machine, of which one can be lost.

A process of its own has it: tests fork theirs, in which the threads of Ray would be missing, and need their own
handlers of signals.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 600.0  # until it is given up, however slow the machine
REPOSITORY = Path(__file__).parents[2]


class LocalCluster:
    """Nodes with a CPU each; the first is the head, and `environment` the variables of what runs on them."""

    def __init__(self, nodes: int, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", __name__, str(nodes), json.dumps(environment)]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._do("start")  # of the head, for `hydra.launcher.address`

    def lose_node(self) -> None:
        """Kill a node that is not the head, with all that runs there."""
        self._do("lose_node")

    def stop(self) -> None:
        """End what is left of it."""
        self._do("stop")

    def end(self) -> None:
        """End it and the process that has it."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()

    def _do(self, what: str) -> str:
        """Have its process do something, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process of the cluster has ended: {what}"
        return answer.strip()


@contextmanager
def cluster_of(nodes: int, **environment: str) -> Iterator[LocalCluster]:
    """Have a cluster within the block."""
    cluster = LocalCluster(nodes, environment)
    try:
        yield cluster
    finally:
        cluster.end()


def serve(nodes: int, environment: dict[str, str]) -> None:
    """Do what the lines of the standard input say, `start` first, each answered by the address of the head."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "env_vars": environment, "wait": False}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    for line in sys.stdin:
        if line == "start\n":
            cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
            for _ in range(nodes - 1):
                cluster.add_node(**node)
            cluster.wait_for_nodes(START_SECONDS)
        elif line == "lose_node\n":
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        elif line == "stop\n":
            cluster.shutdown()
        print(cluster.address, file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
