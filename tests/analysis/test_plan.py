"""The analysis `plan`."""

import json
import re

import pytest
import yaml
from rich.console import Console

from simbal.analysis.evaluate import evaluate
from simbal.analysis.flops import PAPER, read_option
from simbal.analysis.plan import plan
from simbal.config.schema import CL100K_IDS
from simbal.config.signatures import check_arguments
from simbal.errors import UserError
from simbal.training import run as training
from tests.conftest import CONF
from tests.in_process import run

KEYS = yaml.safe_load((CONF / "analysis" / "plan.yaml").read_text())["plan"]
del KEYS["_target_"]


def keys_of(group, option):
    return read_option(group, option)


def planned(model="moe_m", hardware="h200", gpus=8, **changes):
    """The plan of a model; `changes` may be keys of model, hardware or plan."""
    of_model, of_hardware = keys_of("model", model), keys_of("hardware", hardware)
    of_hardware |= {key: changes.pop(key) for key in [*changes] if key in of_hardware}
    of_model |= {key: changes.pop(key) for key in [*changes] if key in of_model}
    check_arguments("analysis.plan.", plan, KEYS | changes, given=("model", "hardware", "gpus"))
    return plan(of_model, of_hardware, gpus, **KEYS | changes)


def metrics(*arguments, **changes):
    return planned(*arguments, **changes).record["metrics"]


def printed(result):
    console = Console(width=120)
    with console.capture() as capture:
        result.show(console)
    return capture.get()


def test_the_papers_medium_run_matches_hand_calculation():
    found = metrics(hardware="h100", utilization=0.4, price_per_hour=2.5)
    rate = 8 * 989e12 * 0.4 / (3 * 330_591_744)  # FLOP/s by FLOPs of a token, forward and backward
    assert found["forward_flops"] == 330_591_744
    assert found["tokens"] == 19_000 * 512 * 2048 == 19_922_944_000  # the paper's 19.9B
    assert found["tokens_per_second"] == pytest.approx(rate) == pytest.approx(3_191_046, rel=1e-6)
    # before the first step, after 1, 2, 4 ... 256, every 500 of 19,000 steps, and the whole shard at the end
    assert found["validation_tokens"] == (1 + 9 + 38) * 1_048_576 + 80_000_000 == 130_331_648
    assert found["days"] == pytest.approx((19_922_944_000 + 130_331_648 / 3) / 3_191_046 / 86_400, rel=1e-6)
    assert found["device_hours"] == pytest.approx(24 * 8 * found["days"])
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    assert found["final_bytes"] == 2 * 626_094_336  # trainer=paper_m is bf16-true
    assert found["checkpoint_bytes"] == 6 * 626_094_336


def test_validation_counts_and_is_limited_to_the_split():
    many = metrics(val_every=25, validation_tokens=80_000_000)
    assert many["validation_tokens"] == (1 + 5 + 760 + 1) * 80_000_000
    assert metrics(validation_tokens=10**9)["validation_tokens"] == 49 * 80_000_000


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_models_get_its_tokens_steps_and_batch(preset):
    record = planned(preset).record
    tokens = {"dense_m": 19.9e9, "moe_m": 19.9e9, "dense_l": 78.6e9, "moe_l": 78.6e9, "moe_m_bias": 19.9e9}[preset]
    assert record["metrics"]["tokens"] == pytest.approx(tokens, rel=2e-3)
    assert record["recipe"]["steps"] == PAPER[preset].steps
    assert record["recipe"]["global_batch"] * record["recipe"]["seq_len"] == 2**20
    assert record["recipe"]["shape"]["vocab_size"] == CL100K_IDS
    assert record["recipe"]["trainer"] == f"paper_{preset.split('_')[1]}"


@pytest.mark.parametrize(("model", "hardware"), [("moe_m", "h200"), ("tiny", "cpu")])
def test_twice_the_devices_take_half_the_days_and_the_same_device_hours(model, hardware):
    one, two = metrics(model, hardware, 1, seq_len=128), metrics(model, hardware, 2, seq_len=128)
    assert two["days"] == pytest.approx(one["days"] / 2)
    assert two["device_hours"] == pytest.approx(one["device_hours"])
    assert two["cost"] == pytest.approx(one["cost"])
    fast, slow = (metrics(hardware="h100", utilization=utilization)["days"] for utilization in (0.6, 0.3))
    assert fast == pytest.approx(slow / 2)


def test_a_sweep_takes_as_long_as_its_rounds_and_costs_as_much_as_all_runs():
    sweep = planned(runs=5, at_once=2)
    found = sweep.record["metrics"]
    assert (found["days"], found["cost"]) == pytest.approx((found["sweep_days"] / 3, found["sweep_cost"] / 5))
    assert "time of 5 runs" in printed(sweep)


def test_a_given_speed_replaces_the_assumed_one():
    usual, given = planned("tiny", "cpu", 1), planned("tiny", "cpu", 1, tokens_per_second=3700)
    assert "assumed: 30% of 1 x 0.211 TFLOP/s" in printed(usual)
    assert "assumed: 30%" not in printed(given)
    found, before = given.record["metrics"], usual.record["metrics"]
    assert found["days"] == pytest.approx(before["days"] * before["tokens_per_second"] / 3700)


def test_memory_of_ddp_and_fsdp_matches_hand_calculation():
    memory = planned().record["memory"]
    ddp, fsdp = memory["ddp"], memory["fsdp"]
    assert ddp["weights"] == ddp["gradients"] == ddp["sharing"] == 2 * 626_094_336
    assert ddp["moments"] == 2 * ddp["weights"]
    parts = ("weights", "gradients", "moments", "activations", "working", "sharing")
    assert ddp["peak"] == sum(ddp[part] for part in parts)  # micro-batches are accumulated
    assert ddp["peak"] == planned(gpus=1).record["memory"]["one device"]["peak"] + ddp["gradients"]
    assert fsdp["weights"] == 2 * 626_094_336 / 8
    assert fsdp["moments"] == 2 * fsdp["gradients"] == 2 * fsdp["weights"]
    layer = 32 * 3 * 768 * 768 + 32 * 768
    assert fsdp["sharing"] == 2 * 2 * (626_094_336 - 6 * layer)  # two layers, and everything else
    assert (fsdp["activations"], fsdp["working"]) == (ddp["activations"], ddp["working"])


def test_a_step_fits_only_into_its_share_of_the_memory():
    for strategy in planned("moe_l", "h100", precision="bf16-mixed").record["memory"].values():
        assert strategy["fits"] == (strategy["peak"] <= 0.9 * 80e9)
    assert not planned(memory_bytes=1e9).record["memory"]["fsdp"]["fits"]


def test_a_device_accumulates_micro_batches_up_to_its_part_of_the_global_batch():
    for changes, batch in (({}, "8 x 4 x 16"), ({"gpus": 64}, "64 x 1 x 8"), ({"micro_batch": 8}, "8 x 8 x 8")):
        assert f"{batch} x 2048 = 1,048,576" in printed(planned(**changes))


def test_the_estimated_size_of_a_checkpoint_is_that_of_a_run(small_spec, monkeypatch):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 1.5}, "gpus=1.5 must be a whole number of at least 1"),
        ({"gpus": 1024}, "gpus=1024 must divide the 512 sequences of a step: 1, 2, 4, "),
        ({"micro_batch": 48}, "analysis.plan.micro_batch=48 must divide the 64 sequences of a device: 1, 2, 4, "),
        ({"at_once": 1.5}, "analysis.plan.at_once=1.5 must be an integer"),
        ({"utilization": 1.1}, "analysis.plan.utilization=1.1 must be at most 1"),
        ({"price_per_hour": -1}, "hardware.price_per_hour=-1 must be at least 0"),
        ({"top_k": 33}, "model.top_k=33 must be between 1 and model.num_experts=32"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_allowed_ones(change, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        planned(**change)


def test_other_analyses_reject_the_inputs_of_plan(tmp_path):
    settings = {"_target_": "simbal.analysis.orthogonality.orthogonality"}
    with pytest.raises(UserError, match="^hardware= does not apply to analysis=orthogonality"):
        evaluate({"orthogonality": settings}, None, False, "cpu", str(tmp_path), {"hardware": 1})


def test_the_command_in_the_guide_works(tmp_path):
    arguments = "analysis=plan model=moe_m hardware=h200 gpus=8 hardware.price_per_hour=2"
    done = run(tmp_path, "evaluate.py", *arguments.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "training moe_m on 8 x NVIDIA H200 SXM" in done.stdout
    written = json.loads((tmp_path / "outputs" / "analysis" / "plan.json").read_text())
    assert written["settings"]["model"] == keys_of("model", "moe_m")
    assert written["metrics"]["cost"] == pytest.approx(2 * written["metrics"]["device_hours"])
