"""Read the data of a tracker: how often each point was logged, and the config."""

import json
import struct
import warnings
from collections import Counter
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from simbal.runs.spec import RunSpec
from tests.child_processes import wait_until
from tests.training.run_files import rows

BLOCK, HEADER, START = 32768, 7, 7  # bytes: a .wandb file is a LevelDB log after seven bytes of its own
Points = Counter  # of (key, step, value)


def expected(spec: RunSpec) -> Points:
    """Return the points of metrics.jsonl and the record."""
    points = Counter()
    for row in rows(spec):
        points.update((key, row["step"], value) for key, value in row.items() if isinstance(value, int | float))
    metrics = json.loads((spec.path / "record.json").read_text())["metrics"]
    steps = spec.config.trainer.max_steps
    points.update((f"final/{key}", steps, value) for key, value in metrics.items() if value is not None)
    return comparable(points)


def comparable(points: Points) -> Points:
    """Round values to four bytes, as TensorBoard does, and drop speeds, which differ between runs."""
    return Counter(
        {
            (key, step, struct.pack("f", value)): count
            for (key, step, value), count in points.items()
            if key not in ("step", "tokens_per_second", "hp_metric")
        }
    )


def logged(spec: RunSpec) -> tuple[Points, dict]:
    """Return the points and the config that the tracker of a run has received."""
    read = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[spec.config.logger.kind]
    points, config = read(spec)
    return comparable(points), config


def _tensorboard(spec: RunSpec) -> tuple[Points, dict]:
    events = EventAccumulator(str(spec.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return Counter((key, e.step, e.value) for key in events.Tags()["scalars"] for e in events.Scalars(key)), {}


def mlflow_client(folder: Path):
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of sqlalchemy, caused by the first client
        return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def _mlflow(spec: RunSpec) -> tuple[Points, dict]:
    client, run_id = mlflow_client(spec.path.parents[1]), json.loads((spec.path / "trackers.json").read_text())["id"]
    run = client.get_run(run_id)
    points = Counter((key, m.step, m.value) for key in run.data.metrics for m in client.get_metric_history(run_id, key))
    return points, run.data.params


def _wandb(spec: RunSpec) -> tuple[Points, dict]:
    points, config = Counter(), {}
    for file in sorted(spec.path.glob("wandb/offline-run-*/*.wandb")):
        # a process of wandb writes it, and may take a while after the end of the run
        wait_until(lambda file=file: any(record.HasField("exit") for record in wandb_records(file)))
        for record in wandb_records(file):
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("trainer/global_step", None)
            points.update((key, int(step), value) for key, value in row.items() if not key.startswith("_"))
    return points, config


def wandb_records(file: Path) -> list:
    """Return the records of a .wandb file; an entry of its log may be cut into parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, entry, records = file.read_bytes(), START, b"", []
    while place + HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        entry += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # a complete entry, or its last part
            records.append(Record.FromString(entry))
            entry = b""
    return records
