"""A Ray cluster of several nodes on this machine, of which one, or the head, can be lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

START_SECONDS = 600.0  # until it is given up, however slow the machine


class LocalCluster:
    """Nodes with a CPU each; the first is the head, and `environment` the variables of what runs on them."""

    def __init__(self, nodes: int, environment: dict[str, str]) -> None:
        self.nodes, self._node = nodes, {"num_cpus": 1, "env_vars": environment, "wait": False}
        self.start()

    @property
    def address(self) -> str:
        """Of the head, for `hydra.launcher.address`."""
        return str(self.cluster.address)

    def start(self) -> None:
        """Start all nodes; those of a cluster that has lost its head are no more."""
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**self._node, "include_dashboard": False})
        for _ in range(self.nodes - 1):
            self.add_node()
        self.cluster.wait_for_nodes(START_SECONDS)

    def add_node(self) -> None:
        """Start another node, which takes its time."""
        self.cluster.add_node(**self._node)

    def lose_node(self) -> None:
        """Kill a node that is not the head, with all that runs there."""
        self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)

    def lose_head(self) -> None:
        """Kill the head; other nodes take up to a minute to see it."""
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)

    def stop(self) -> None:
        """End what is left of it."""
        self.cluster.shutdown()


@contextmanager
def cluster_of(nodes: int, **environment: str) -> Iterator[LocalCluster]:
    """Have a cluster within the block."""
    handler = signal.getsignal(signal.SIGTERM)  # Ray puts one in its place that ends this process
    cluster = LocalCluster(nodes, environment)
    try:
        yield cluster
    finally:
        cluster.stop()
        signal.signal(signal.SIGTERM, handler)
