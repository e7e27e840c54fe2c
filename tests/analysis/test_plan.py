"""A plan's numbers by hand, and what they must obey."""

import json

import pytest

from simbal.analysis.flops import PAPER
from simbal.config.schema import CL100K_IDS
from simbal.training import run as training
from tests.analysis.plans import keys_of, metrics, planned, shown


def test_the_papers_medium_run_by_hand():
    found = metrics(hardware="h100", utilisation=0.4, price_per_hour=2.5)
    rate = 8 * 989e12 * 0.4 / (3 * 330_591_744)  # FLOP/s by FLOPs of a token, forward and backward
    assert found["forward_flops"] == 330_591_744
    assert found["tokens"] == 19_000 * 512 * 2048 == 19_922_944_000  # the paper's 19.9B
    assert found["tokens_per_second"] == pytest.approx(rate) == pytest.approx(3_191_046, rel=1e-6)
    # before the first step, after 1, 2, 4 ... 256, after every 500th of 19,000, and of a whole shard at the end
    assert found["validation_tokens"] == (1 + 9 + 38) * 1_048_576 + 80_000_000 == 130_331_648
    assert found["days"] == pytest.approx((19_922_944_000 + 130_331_648 / 3) / 3_191_046 / 86_400, rel=1e-6)
    assert found["device_hours"] == pytest.approx(24 * 8 * found["days"])
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    assert found["final_bytes"] == 2 * 626_094_336  # trainer=paper_m is bf16-true
    assert found["checkpoint_bytes"] == 6 * 626_094_336


def test_validations_on_a_whole_shard_every_25_steps_take_half_of_the_time():
    many, none = metrics(val_every=25, validation_tokens=80_000_000), metrics(val_every=10**9, validation_tokens=1)
    assert many["validation_tokens"] == (1 + 5 + 760 + 1) * 80_000_000
    assert many["days"] > 1.9 * none["days"]


def test_a_split_that_is_smaller_than_a_validation_is_all_of_it():
    assert metrics(validation_tokens=10**9)["validation_tokens"] == 49 * 80_000_000


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_models_have_its_tokens_steps_and_batch(preset):
    record = planned(preset).record
    printed = {"dense_m": 19.9e9, "moe_m": 19.9e9, "dense_l": 78.6e9, "moe_l": 78.6e9}[preset]
    assert record["metrics"]["tokens"] == pytest.approx(printed, rel=2e-3)
    assert record["recipe"]["steps"] == PAPER[preset].steps
    assert record["recipe"]["global_batch"] * record["recipe"]["seq_len"] == 2**20
    assert record["recipe"]["shape"]["vocab_size"] == CL100K_IDS
    assert record["recipe"]["trainer"] == f"paper_{preset[-1]}"


@pytest.mark.parametrize(("model", "hardware"), [("moe_m", "h200"), ("moe_m", "h100"), ("tiny", "cpu")])
def test_twice_the_devices_take_half_the_days_and_the_same_device_hours(model, hardware):
    one, two = metrics(model, hardware, 1, seq_len=128), metrics(model, hardware, 2, seq_len=128)
    assert two["days"] == pytest.approx(one["days"] / 2)
    assert two["device_hours"] == pytest.approx(one["device_hours"])
    assert two["cost"] == pytest.approx(one["cost"])
    fast, slow = (metrics(hardware="h100", utilisation=utilisation)["days"] for utilisation in (0.6, 0.3))
    assert fast == pytest.approx(slow / 2)


def test_a_sweep_takes_the_time_of_the_runs_that_follow_one_another_and_costs_as_much_as_all():
    sweep = planned(runs=5, at_once=2)
    found = sweep.record["metrics"]
    assert found["days"] == metrics()["days"]
    assert found["sweep_days"] == 3 * found["days"]
    assert found["sweep_cost"] == 5 * found["cost"]
    assert "time of 5 runs" in shown(sweep)
    assert "runs" not in shown(planned()).partition("memory of a device")[0]


def test_a_given_rate_counts_before_the_assumed_one():
    usual, given = planned("tiny", "cpu", 1), planned("tiny", "cpu", 1, tokens_per_second=3700)
    assert "assumed: 30% of 1 x 0.211 TFLOP/s" in shown(usual)
    assert "assumed: 30%" not in shown(given)
    found, before = given.record["metrics"], usual.record["metrics"]
    assert found["tokens_per_second"] == 3700
    assert found["days"] == pytest.approx(before["days"] * before["tokens_per_second"] / 3700)


def test_ddp_has_all_on_each_device_and_buckets_of_gradients():
    memory = planned().record["memory"]["ddp"]
    assert memory["weights"] == memory["gradients"] == memory["sharing"] == 2 * 626_094_336
    assert memory["moments"] == 2 * memory["weights"]
    parts = ("weights", "gradients", "moments", "activations", "working", "sharing")
    assert memory["peak"] == sum(memory[part] for part in parts)  # it accumulates micro-batches
    alone = planned(gpus=1).record["memory"]["one device"]
    assert memory["peak"] == alone["peak"] + memory["gradients"]


def test_fsdp_has_its_part_and_what_it_puts_together():
    memory = planned().record["memory"]["fsdp"]
    assert memory["weights"] == 2 * 626_094_336 / 8
    assert memory["moments"] == 2 * memory["gradients"] == 2 * memory["weights"]
    layer = 32 * 3 * 768 * 768 + 32 * 768
    others = 626_094_336 - 8 * layer
    assert memory["sharing"] == 2 * 2 * (others + 2 * layer)
    ddp = planned().record["memory"]["ddp"]
    assert (memory["activations"], memory["working"]) == (ddp["activations"], ddp["working"])
    assert memory["peak"] < ddp["peak"]


def test_a_step_that_needs_more_than_the_share_of_the_memory_does_not_fit():
    memory = planned("moe_l", "h100", precision="bf16-mixed").record["memory"]
    assert memory["fsdp"]["peak"] < memory["ddp"]["peak"]
    for way in memory.values():
        assert way["fits"] == (way["peak"] <= 0.9 * 80e9)
    assert not planned(memory_bytes=1e9).record["memory"]["fsdp"]["fits"]


def test_a_device_accumulates_what_its_micro_batch_leaves_of_the_global_batch():
    assert "8 x 4 x 16 x 2048 = 1,048,576" in shown(planned())
    assert "64 x 1 x 8 x 2048 = 1,048,576" in shown(planned(gpus=64))  # eight sequences are left of sixteen
    assert "8 x 8 x 8 x 2048 = 1,048,576" in shown(planned(micro_batch=8))


def test_a_checkpoint_is_as_large_as_one_of_a_run(small_spec, monkeypatch):
    monkeypatch.setattr(training.checkpoint, "remove_periodic", lambda folder: None)
    model = keys_of("model", "tiny")
    spec = small_spec(
        *(f"model.{key}={json.dumps(value)}" for key, value in model.items()),
        "trainer.max_steps=2", "trainer.ckpt_every=2", "trainer.val_every=2", "balancing=lf_simbal",
    )  # fmt: skip
    training.train(spec)
    found = metrics("tiny", "cpu", 1, vocab_size=64)
    files = spec.path / "checkpoints"
    assert (files / "step-00000002.ckpt").stat().st_size == pytest.approx(found["checkpoint_bytes"], rel=0.02)
    assert (files / "final.ckpt").stat().st_size == pytest.approx(found["final_bytes"], rel=0.02)
