"""A kind of bf16 weights that stands still is named in the log and the record, with the remedy; fp32 ones never are."""

import pytest

from simbal.runs.folder import RunFolder
from simbal.training.run import train

BF16 = ("trainer.precision=bf16-true", "trainer.force_precision=true", "optim.warmup_steps=0")


def warned(small_spec, *keys: str) -> list[str]:
    spec = small_spec("balancing=simbal", *keys)
    train(spec)
    warnings = RunFolder(spec.path).read_record()["warnings"]
    logged = (spec.path / "train.log").read_text()
    assert all(f"WARNING {sentence}" in logged for sentence in warnings)
    return warnings


def test_norm_gains_that_no_step_can_move_are_named(small_spec):
    (sentence,) = warned(small_spec, *BF16, "optim.lr=0.0005")
    gains = small_spec().config.model
    number = (2 * gains.num_layers + 1) * gains.d_model
    assert f"0 of {number:,} entries of the norm gains moved in 12 steps" in sentence
    assert "optim.lr=0.0005" in sentence
    assert "trainer.precision=bf16-mixed" in sentence


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_rate_at_which_nothing_moves_names_every_kind(small_spec, tied):
    keys = (f"model.tie_embeddings={tied}", "optim.lr=1e-9", "optim.weight_decay=0")
    sentences = warned(small_spec, *BF16, *keys)
    kinds = [sentence.partition("entries of the ")[2].partition(" moved")[0] for sentence in sentences]
    assert sorted(kinds) == ["attention", "feed-forwards", "head", "norm gains", "routers"]


@pytest.mark.parametrize(
    "keys",
    [(*BF16, "optim.lr=0.02"), ("trainer.precision=bf16-mixed", BF16[1], "optim.lr=0.0005"), ("optim.lr=1e-6",)],
    ids=["bf16 that moves", "fp32 weights under bf16", "fp32"],
)
def test_what_moves_and_what_is_no_bf16_is_not_named(small_spec, keys):
    assert warned(small_spec, *keys) == []
