"""Read the files of runs, and kill runs."""

import json

import pytest
import torch

from simbal.training import checkpoint
from simbal.training.callbacks import MetricsLogger
from simbal.training.run import train

OTHER_HEADS = (  # attention as in other models: shared heads of their own width, QK-norm and tied embeddings
    "model.num_kv_heads=1", "model.head_dim=6", "model.qk_norm=head", "model.tie_embeddings=true",
)  # fmt: skip


class KilledError(BaseException):
    """Not an Exception, so that nothing records a failure, as after kill -9."""


def train_until(monkeypatch, spec, step: int) -> None:
    """Train, and kill the run at the start of a step, counted from 0."""
    original = MetricsLogger.on_train_batch_start

    def start(self, trainer, *rest):
        if trainer.global_step == step:
            raise KilledError
        original(self, trainer, *rest)

    train_killed(monkeypatch, spec, MetricsLogger, "on_train_batch_start", start)


def train_killed(monkeypatch, spec, owner, name: str, replacement) -> None:
    """Train with `owner.name` replaced by something that kills the run."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, replacement)
        with pytest.raises(KilledError):
            train(spec)


def checkpoints(spec) -> list[str]:
    return sorted(path.name for path in (spec.path / "checkpoints").glob("*"))


def rows(spec, key: str = "step") -> list[dict]:
    """Return the rows of metrics.jsonl that have `key`."""
    lines = (spec.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def without_speed(spec) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows(spec)]


def weights(spec) -> dict[str, torch.Tensor]:
    return checkpoint.read(spec.path / "checkpoints" / "final.ckpt")["state_dict"]


def assert_same_weights(first, second) -> None:
    other = weights(second)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(first).items())


def assert_same_run(first, second) -> None:
    assert without_speed(first) == without_speed(second)
    assert_same_weights(first, second)
