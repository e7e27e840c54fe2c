"""Reads what runs left behind."""

import json

import torch

from simbal.training import checkpoint

OTHER_HEADS = (  # other people's attention: shared heads of their own width, QK-norm and tied embeddings
    "model.num_kv_heads=1", "model.head_dim=6", "model.qk_norm=head", "model.tie_embeddings=true",
)  # fmt: skip


def rows(spec) -> list[dict]:
    return [json.loads(line) for line in (spec.path / "metrics.jsonl").read_text().splitlines()]


def without_speed(spec) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows(spec)]


def weights(spec) -> dict[str, torch.Tensor]:
    return checkpoint.read(spec.path / "checkpoints" / "final.ckpt")["state_dict"]


def assert_same_run(first, second) -> None:
    assert without_speed(first) == without_speed(second)
    other = weights(second)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(first).items())
