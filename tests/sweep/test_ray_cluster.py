"""A sweep on a Ray cluster of two nodes, one of which is taken away."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.child_processes import wait_until
from tests.conftest import CONF, MARKOV, SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("hydra_plugins.hydra_ray_launcher") is None,
        reason="Ray's launcher wants cloudpickle<3, the pinned joblib cloudpickle>=3",
    ),
]


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    try:
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def sweep_on(cluster, folder, cache_dir, *keys: str) -> "subprocess.Popen[str]":
    places = (f"output_dir={folder}", f"data.cache_dir={cache_dir}")
    ray = ("hydra/launcher=ray_cluster", f"hydra.launcher.ray.init.address={cluster.address}")
    command = [
        sys.executable,
        CONF.parent / "train.py",
        "-m",
        *SMALL,
        *MARKOV,
        *places,
        "balancing=simbal,lbl",
        *ray,
        *keys,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def locks(folder) -> list[int]:
    """The processes that are at a run."""
    return [int(said.split()[1]) for file in folder.glob("default/*/.lock") if (said := file.read_text())]


def test_two_nodes_share_a_sweep(cluster, tmp_path, cache_dir):
    sweep = sweep_on(cluster, tmp_path, cache_dir, "seed=0-1")
    out, _ = sweep.communicate()
    assert sweep.returncode == 0, out
    records = [json.loads(file.read_text()) for file in tmp_path.glob("default/*/record.json")]
    assert [record["status"] for record in records] == ["finished"] * 4
    assert (tmp_path / "default" / "table.json").exists()


def test_a_run_whose_node_is_taken_away_is_done_on_the_other_from_where_it_was(cluster, tmp_path, cache_dir):
    long = ("trainer.max_steps=300", "trainer.ckpt_every=10", "trainer.val_every=300", "trainer.log_every=1")
    sweep = sweep_on(cluster, tmp_path, cache_dir, *long)
    wait_until(lambda: sweep.poll() is not None or len([*tmp_path.glob("default/*/checkpoints/step-*.ckpt")]) >= 2)
    (second,) = cluster.worker_nodes
    cluster.remove_node(second, allow_graceful=False)
    out, _ = sweep.communicate()
    assert sweep.returncode == 0, out
    logs = [file.read_text() for file in tmp_path.glob("default/*/train.log")]
    starts = [
        line.split("from step ")[1].split()[0] for log in logs for line in log.splitlines() if "from step" in line
    ]
    assert len(starts) == 3
    assert max(map(int, starts)) > 0
