"""Accuracy of `analysis=plan` for a sweep on a Ray cluster: python -m benchmarks.plan_of_a_sweep [steps]

The cluster has three nodes on this machine: a head without jobs and two nodes that share the cores, so as many runs
train at once as there are cores. The sweep has four runs of `model=tiny` with `hardware=cpu`, by default of 500 steps.
The plan uses the speed of a short sweep on the same cluster. Data preparation and cluster start are not measured. The
printed speeds explain the difference between plan and sweep.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from simbal.processes import usable_cores

REPOSITORY = Path(__file__).parents[1]
ARMS, SEEDS = ("simbal", "lbl"), ("0", "1")
SHORT = "trainer.max_steps=60"


def main(steps: int = 500) -> None:
    """Print the planned time, the actual time and their ratio."""
    runs, at_once = len(ARMS) * len(SEEDS), usable_cores() // 2 * 2
    if not at_once:
        raise SystemExit("two nodes need at least two cores")
    call("prepare.py")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    with tempfile.TemporaryDirectory() as temporary:
        place = f"output_dir={temporary}"
        ray = ("hydra/launcher=ray", f"hydra.launcher.address={cluster.address}", "trainer.accelerator=cpu", place)
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=at_once // 2)
            call("train.py", "-m", "name=short", "model=tiny", f"seed=0-{at_once - 1}", SHORT, *ray)
            rate = statistics.median(speeds(Path(temporary, "short")))
            grid = (f"balancing={','.join(ARMS)}", f"seed={','.join(SEEDS)}", f"trainer.max_steps={steps}")
            started = time.perf_counter()
            call("train.py", "-m", "name=long", "model=tiny", *grid, *ray)
            taken = time.perf_counter() - started
        finally:
            cluster.shutdown()
        sizes = {"runs": runs, "at_once": at_once, "steps": steps, "tokens_per_second": rate}
        keys = [f"analysis.plan.{key}={value}" for key, value in sizes.items()]
        call("evaluate.py", "analysis=plan", "model=tiny", "hardware=cpu", *keys, place)
        plan = json.loads(Path(temporary, "analysis", "plan.json").read_text())["metrics"]
        of_runs = speeds(Path(temporary, "long"))
    assert len(of_runs) == runs
    predicted = plan["sweep_days"] * 86_400
    print(f"{runs} runs of {steps} steps, {at_once} in parallel on three nodes")
    print(f"planned {predicted:.1f} s, actual {taken:.1f} s: ratio {taken / predicted:.2f}")
    print(f"tokens per second: planned {rate:,.0f}, actual {', '.join(f'{speed:,.0f}' for speed in of_runs)}")


def speeds(sweep: Path) -> list[float]:
    """Return the tokens per second of each run of a sweep."""
    return [json.loads(file.read_text())["tokens_per_second"] for file in sweep.glob("*/record.json")]


def call(program: str, *arguments: str) -> None:
    """Run a program of the repository."""
    subprocess.run([sys.executable, program, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
