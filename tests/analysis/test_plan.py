"""A plan's numbers by hand, what they must obey, and what they are known by."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.flops import preset_shape
from simbal.config.schema import CL100K_IDS
from simbal.cost import hardware as devices
from simbal.cost import recipe
from simbal.cost.memory import Step, device_memory, largest_micro_batch, memory_cost
from simbal.cost.parameters import parameters
from simbal.cost.recipe import PAPER
from simbal.training import run as training
from tests.analysis.plans import keys_of, metrics, planned, resolved_trainer, shown

VALIDATION = {"val_at": "none", "validation_tokens": 2**20, "final_validation_tokens": 77_000_000}


def test_the_papers_medium_run_by_hand():
    found = metrics(hardware="h100", utilisation=0.4, price_per_hour=2.5, **VALIDATION)
    rate = 8 * 989e12 * 0.4 / (3 * 330_591_744)  # FLOP/s by FLOPs of a token, forward and backward
    assert found["tokens"] == 19_000 * 512 * 2048 == 19_922_944_000  # the paper's 19.9B
    assert found["tokens_per_second"] == pytest.approx(rate) == pytest.approx(3_191_046, rel=1e-6)
    assert found["validations"] == 39  # before the first step and after every 500th of 19,000
    assert found["validation_tokens"] == 39 * 1_048_576 + 77_000_000 == 117_894_464
    assert found["days"] == pytest.approx((19_922_944_000 + 117_894_464 / 3) / 3_191_046 / 86_400, rel=1e-6)
    assert found["validation_share"] == pytest.approx(0.0019687, rel=1e-4)
    assert (found["pes_tokens"], found["pes_share"]) == (0, 0)
    assert found["device_hours"] == pytest.approx(24 * 8 * found["days"])
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    assert found["final_bytes"] == 2 * 626_094_336  # trainer=paper_m is bf16-true
    assert found["checkpoint_bytes"] == 6 * 626_094_336
    assert found["disk_bytes"] == 18 * 626_094_336


def test_validations_on_a_whole_shard_every_25_steps_are_seen_to_take_half_of_the_time():
    """At the paper's size: 58.7B tokens are validated where 19.9B are trained on."""
    many = {"val_every": 25, "validation_tokens": 77_000_000, "final_validation_tokens": 77_000_000, "val_at": "none"}
    finding = planned(pes_every=25, pes_tokens=131_072, **many)
    found = finding.record["metrics"]
    assert (found["validations"], found["validation_tokens"]) == (761, 762 * 77_000_000)
    assert found["pes_tokens"] == 762 * 131_072
    head = 2 * 100_277 * 768
    passes = 330_591_744 - head + 2 * 8 * 32 * 3 * 768 * 768  # FLOPs of a token, and beside them of all its experts
    pes = 8 * 762 * 131_072 * passes / (3 * 330_591_744)  # on each of eight devices
    work = 19_922_944_000 + 762 * 77_000_000 / 3 + pes
    assert found["validation_share"] == pytest.approx(762 * 77_000_000 / 3 / work)
    assert found["pes_share"] == pytest.approx(pes / work)
    assert found["days"] == pytest.approx(work / found["tokens_per_second"] / 86_400)
    text = shown(finding)
    assert "762 x 131,072, on each device" in text
    assert f"{found['validation_share']:.1%}" in text
    assert "48." in f"{found['validation_share']:.1%}"


def test_pes_is_of_no_more_tokens_than_are_held_out_and_of_no_shared_expert():
    usual = planned(pes_every=500, pes_tokens=10**6, final_validation_tokens=10**6).record["metrics"]
    assert planned(pes_every=500, pes_tokens=10**9, final_validation_tokens=10**6).record["metrics"] == usual
    shape = preset_shape("moe_m", 100_277)
    shared = parameters(replace(shape, num_shared_experts=2))
    assert shared.ffn_routed == parameters(shape).ffn_routed == parameters(shape).ffn < shared.ffn


@pytest.mark.parametrize("preset", PAPER)
@pytest.mark.parametrize("key", ["val_every", "val_at", "pes_every", "pes_tokens"])
def test_the_papers_models_are_validated_as_their_configs_say(preset, key):
    written = resolved_trainer(f"paper_{preset[-1]}")
    found = planned(preset).record["recipe"]
    assert found[key] == written[key]
    assert found["validation_tokens"] == keys_of("data", "dclm")["validation_tokens"]


@given(
    steps=st.integers(1, 300), every=st.integers(1, 300), pes=st.integers(0, 300), at=st.sampled_from(["log", "none"])
)
def test_validations_are_those_of_a_training_loop(steps, every, pes, at):
    usual = recipe.recipe_of(keys_of("model", "tiny"), "cpu", {})
    run = replace(usual, steps=steps, val_every=every, val_at=at, pes_every=pes)
    powers = [2**power for power in range(20)] if at == "log" else []
    after = [s for s in range(steps + 1) if s % every == 0 or s == steps or (s < every and s in powers)]
    assert run.validations == len(after)
    assert run.validated_tokens == len(after) * run.tokens_of_validation + run.final_validation_tokens
    measured = len([s for s in range(steps + 1) if s % pes == 0]) + 1 if pes else 0  # and of the trained model
    assert run.pes_measurements == measured


def test_a_split_that_is_smaller_than_a_validation_is_all_of_it_and_its_size_is_assumed_unless_given():
    found = metrics(validation_tokens=10**9, final_validation_tokens=10**6, val_at="none")
    assert found["validation_tokens"] == 40 * 10**6
    sentence = "That a validation split has 80,000,000 tokens is assumed (analysis.plan.final_validation_tokens)."
    assert sentence in " ".join(shown(planned()).split())
    assert "final_validation_tokens)" not in shown(planned(final_validation_tokens=10**6))


def test_a_dense_model_has_no_similarity_of_experts_to_measure():
    assert metrics("dense_m", pes_every=25)["pes_tokens"] == 0


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_models_have_its_tokens_steps_and_batch(preset):
    record = planned(preset).record
    printed = {"dense_m": 19.9e9, "moe_m": 19.9e9, "dense_l": 78.6e9, "moe_l": 78.6e9}[preset]
    assert record["metrics"]["tokens"] == pytest.approx(printed, rel=2e-3)
    assert record["recipe"]["steps"] == PAPER[preset].steps
    assert record["recipe"]["global_batch"] * record["recipe"]["seq_len"] == 2**20
    assert record["recipe"]["shape"]["vocab_size"] == CL100K_IDS
    assert record["recipe"]["trainer"] == ("paper_m" if preset.endswith("_m") else "paper_l")


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
    assert "3 one after another, 2 at once" in shown(sweep)
    assert "runs" not in shown(planned()).partition("Memory is counted")[0]


def test_a_measured_rate_is_used_for_exactly_what_was_measured_and_named():
    finding = planned("tiny", "cpu", None)
    assert finding.record["metrics"]["tokens_per_second"] == 8865
    assert finding.record["rate"]["measured"]
    assert 'row 1 of simbal/cost/rates.yaml (RESULTS.md, "A training step on a CPU", 2026-11-26)' in " ".join(
        shown(finding).split()
    )
    assert "no measurement" not in shown(finding)
    assert metrics("small", "cpu", 1, vocab_size=8192)["tokens_per_second"] == 2262
    for changes in ({"seq_len": 128}, {"micro_batch": 1}, {"vocab_size": 512}, {"num_layers": 2}, {"device": "mine"}):
        other = planned("tiny", "cpu", 1, **changes).record["rate"]
        assert not other["measured"]
        assert other["basis"] == "assumed: 30% of 1 x 0.211 TFLOP/s"


def test_a_rate_that_is_given_counts_before_one_that_was_measured_elsewhere():
    usual, given = planned("tiny", "cpu", 1), planned("tiny", "cpu", 1, tokens_per_second=3700)
    found = given.record["metrics"]
    assert found["tokens_per_second"] == 3700
    assert found["days"] == pytest.approx(usual.record["metrics"]["days"] * 8865 / 3700)
    assert given.record["rate"]["basis"] == "given: analysis.plan.tokens_per_second"
    assert "no measurement" not in shown(given)


def test_a_rate_of_another_number_of_devices_is_no_measurement():
    finding = planned("tiny", "cpu", 2)
    assert not finding.record["rate"]["measured"]  # two devices have a sequence each, one had two
    assert finding.record["rate"]["basis"].startswith("assumed: 30% of 2")
    scaled = planned("tiny", "cpu", 2, global_batch=4)
    assert scaled.record["metrics"]["tokens_per_second"] == 2 * 8865
    assert "assumed: grows with the devices" in scaled.record["rate"]["basis"]
    assert "The rate is no measurement" in shown(scaled)


def test_a_row_of_as_many_devices_comes_first(monkeypatch):
    row = devices.rows()[0]
    monkeypatch.setattr(devices, "rows", lambda: [row, row | {"devices": 2, "tokens_per_second": 10_000}])
    assert planned("tiny", "cpu", 2, global_batch=4).record["rate"]["tokens_per_second"] == 10_000


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "fused"),
        ({"precision": "32-true"}, "torch"),
        ({"d_expert": 100}, "torch"),
        ({"bias": True}, "reference"),
        ({"backend": "torch"}, "torch"),
    ],
)
def test_the_memory_is_that_of_the_backend_which_training_takes(changes, backend):
    record = planned(gpus=1, **changes).record
    found = record["memory"]["one device"]
    assert record["backend"] == backend
    assert f"experts={backend}" in " ".join(shown(planned(gpus=1, **changes)).split())
    assert found == planned(gpus=1, **changes | {"backend": backend}).record["memory"]["one device"]
    other = {"fused": "torch"}.get(backend, "fused")
    assert found != planned(gpus=1, **changes | {"backend": other}).record["memory"]["one device"]


def test_ddp_has_all_on_each_device_and_buckets_of_gradients():
    step = Step(16, 2048, True, "bf16-true", backend="fused", device="cuda")
    alone = memory_cost(preset_shape("moe_m", CL100K_IDS), step)
    memory = planned().record["memory"]["ddp"]
    assert memory["weights"] == memory["gradients"] == 2 * 626_094_336
    assert memory["sharing"] == memory["gradients"]
    assert memory["peak"] == alone.peak + alone.gradients
    assert planned(gpus=1).record["memory"]["one device"]["peak"] == alone.peak


def test_fsdp_has_its_part_and_what_it_puts_together():
    memory = planned().record["memory"]["fsdp"]
    assert memory["weights"] == pytest.approx(2 * 626_094_336 / 8, rel=1e-4)  # rows are not divided
    assert memory["moments"] == 2 * memory["gradients"] == 2 * memory["weights"]
    layer = 32 * 3 * 768 * 768 + 32 * 768
    others = 626_094_336 - 8 * layer
    assert memory["sharing"] == 2 * 2 * (others + 2 * layer)
    ddp = planned().record["memory"]["ddp"]
    assert (memory["activations"], memory["working"]) == (ddp["activations"], ddp["working"])
    assert memory["peak"] < ddp["peak"]


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    shape, step = preset_shape("moe_l", CL100K_IDS), Step(1, 2048, True, "bf16-mixed", device="cuda")

    def peak(size, sequences=64):
        return device_memory("ddp", shape, replace(step, micro_batch=size, accumulates=size < sequences), 8).peak

    found = planned("moe_l", "h200", precision="bf16-mixed").record["memory"]["ddp"]["largest_micro_batch"]
    assert peak(found) <= 0.9 * 141e9 < peak(2 * found)
    assert largest_micro_batch(lambda size: device_memory("ddp", shape, step, 8), 64, 1) is None


def test_what_does_not_fit_is_said_with_what_would():
    finding = planned("moe_l", "a100_40gb", precision="bf16-mixed")
    memory = finding.record["memory"]
    assert [memory[way]["fits"] for way in ("ddp", "fsdp")] == [False, False]
    assert memory["ddp"]["largest_micro_batch"] is None
    assert "ddp: a step does not fit; nor would any micro-batch." in shown(finding)
    largest = memory["fsdp"]["largest_micro_batch"]
    assert f"fsdp: a step does not fit; analysis.plan.micro_batch={largest} would." in shown(finding)


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


def test_the_recipes_are_those_of_the_configs():
    for preset in PAPER:
        model = keys_of("model", preset)
        trainer = recipe.TRAINERS[model["num_layers"], model["d_model"]]
        assert trainer == f"paper_{preset[-1]}"
        assert keys_of("trainer", trainer)["max_steps"] == PAPER[preset].steps
