"""Reads back what a run has logged, from the files of each logger: the rows of its curves, its config, how it ended."""

import json
import struct
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from simbal.runs.spec import RunSpec
from tests.child_processes import wait_until
from tests.training.run_files import rows

BLOCK, HEADER, START = 32768, 7, 7  # of a .wandb file, in bytes: blocks of a LevelDB log after a few of its own
Points = Counter  # of (key, step, value): how often each was logged


@dataclass(frozen=True)
class Logged:
    """What was found."""

    points: Points
    config: dict


def expected(spec: RunSpec) -> Points:
    """What metrics.jsonl and the record have, less the speed, which no two runs share."""
    points = Counter()
    for row in rows(spec):
        points.update((k, row["step"], v) for k, v in row.items() if isinstance(v, int | float))
    metrics = json.loads((spec.path / "record.json").read_text())["metrics"]
    steps = spec.config.trainer.max_steps
    points.update((f"final/{key}", steps, value) for key, value in metrics.items() if value is not None)
    return rounded(points)


def rounded(points: Points) -> Points:
    """TensorBoard keeps 4 bytes of a number. Speeds are left out: no two runs share them."""
    return Counter(
        {
            (key, step, struct.pack("f", value)): count
            for (key, step, value), count in points.items()
            if key not in ("step", "tokens_per_second")
        }
    )


def logged(spec: RunSpec) -> Logged:
    """By the run's own logger."""
    return READERS[spec.config.logger.kind](spec)


def _tensorboard(spec: RunSpec) -> Logged:
    events = EventAccumulator(str(spec.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    points = Counter((key, e.step, e.value) for key in events.Tags()["scalars"] for e in events.Scalars(key))
    points = Counter({point: count for point, count in points.items() if point[0] != "hp_metric"})
    return Logged(rounded(points), {})


def mlflow_client(folder: Path):
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of sqlalchemy, for what mlflow does at its first client
        return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def _mlflow(spec: RunSpec) -> Logged:
    client, run_id = mlflow_client(spec.path.parents[1]), json.loads((spec.path / "trackers.json").read_text())["id"]
    run = client.get_run(run_id)
    points = Counter((key, m.step, m.value) for key in run.data.metrics for m in client.get_metric_history(run_id, key))
    return Logged(rounded(points), run.data.params)


def _wandb(spec: RunSpec) -> Logged:
    points, config = Counter(), {}
    for file in sorted(spec.path.glob("wandb/offline-run-*/*.wandb")):
        # written by a process of wandb, which may take its time after the end of the run
        wait_until(lambda file=file: any(record.HasField("exit") for record in records(file)))
        for record in records(file):
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("trainer/global_step", None)
            points.update((key, int(step), value) for key, value in row.items() if not key.startswith("_"))
    return Logged(rounded(points), config)


def records(file: Path):
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(content) for content in _entries(file.read_bytes())]


def _entries(content: bytes):
    """Whole entries of a LevelDB log: each part says of its length, and whether another follows."""
    place, entry = START, b""
    while place + HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        entry += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):
            yield entry
            entry = b""


READERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
