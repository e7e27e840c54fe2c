"""What a plan refuses, what else refuses its keys, and its command line as a user gives it."""

import json
import re
import sys

import pytest

from simbal.analysis.evaluate import evaluate
from simbal.analysis.plan import plan
from simbal.cli import command_line
from simbal.errors import UserError
from tests.analysis.plans import KEYS, keys_of, planned
from tests.conftest import CONF
from tests.in_process import run


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpus": 0}, "gpus=0 must be a whole number of at least 1"),
        ({"gpus": 1.5}, "gpus=1.5 must be a whole number of at least 1"),
        ({"gpus": 7}, "gpus=7 cannot share the 512 sequences of a step equally: it may be 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"gpus": 1024}, "gpus=1024 cannot share the 512 sequences"),
        ({"micro_batch": 3}, "analysis.plan.micro_batch=3 must divide the 64 sequences of a device: it may be 1, 2, 4"),
        ({"steps": 0}, "analysis.plan.steps=0 must be a whole number of at least 1"),
        ({"runs": 0}, "analysis.plan.runs=0 must be a whole number of at least 1"),
        ({"at_once": 1.5}, "analysis.plan.at_once=1.5 must be a whole number of at least 1"),
        ({"hardware": "cpu"}, "analysis.plan.precision=bf16-true: one core of an AMD EPYC with AVX-512 has no bf16"),
        ({"utilisation": 0}, "analysis.plan.utilisation=0 must be above 0 and at most 1"),
        ({"utilisation": 1.1}, "analysis.plan.utilisation=1.1 must be above 0 and at most 1"),
        ({"tokens_per_second": 0}, "analysis.plan.tokens_per_second=0 must be a finite number above 0"),
        ({"memory_share": 2}, "analysis.plan.memory_share=2 must be above 0 and at most 1"),
        ({"memory_bytes": 0}, "hardware.memory_bytes=0 must be a finite number above 0"),
        ({"price_per_hour": -1}, "hardware.price_per_hour=-1 must be a finite number of at least 0"),
        ({"fp32_flops": "fast"}, "hardware.fp32_flops=fast must be a number"),
        ({"accelerator": "tpu"}, "hardware.accelerator=tpu is not one of cpu, cuda"),
        ({"d_model": 100}, "model.d_model=100 must be a multiple of twice model.num_heads"),
        ({"top_k": 33}, "model.top_k=33 must lie between 1 and model.num_experts=32"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"d_model": "wide"}, "model.d_model=wide must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_is_allowed(change, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        planned(**change)


def test_it_asks_for_a_model_and_for_hardware():
    with pytest.raises(UserError, match="analysis=plan needs hardware=NAME: there is a100, a100_40gb, cpu, h100, h200"):
        plan(keys_of("model", "tiny"), None, 1, **KEYS)
    with pytest.raises(UserError, match="analysis=plan needs model=NAME: there is bench, dense_l, dense_m, moe_l"):
        plan(None, keys_of("hardware", "cpu"), 1, **KEYS)


@pytest.mark.parametrize("key", ["model", "hardware", "gpus"])
def test_its_keys_are_refused_by_other_analyses(tmp_path, key):
    settings = {"_target_": "simbal.analysis.gram_quanta.gram_quanta"}
    with pytest.raises(UserError, match=f"^{key}= is not for analysis=gram_quanta: leave it out$"):
        evaluate({"gram_quanta": settings}, None, False, "cpu", str(tmp_path), {key: 1})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["hardware=h20"], "hardware=h20: hardware has no option h20; did you mean h200?"),
        (["model=moe_x"], "model has no option moe_x; did you mean moe_"),
        (["hardware=h200", "hardware.price=1"], "there is no key hardware.price; did you mean hardware.price_per_hour"),
        (["gpu=8"], "there is no key gpu; did you mean gpus?"),
    ],
)
def test_a_slip_on_the_command_line_names_what_is_near(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "analysis=plan", *arguments])
    with pytest.raises(SystemExit):
        command_line.check(CONF, "About.", "evaluate")
    assert sentence in capsys.readouterr().err


def test_the_command_line_of_the_guide_works(tmp_path):
    command = "evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8"
    program, *arguments = [*command.split(), "hardware.price_per_hour=2"]
    done = run(tmp_path, program, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "training moe_m on 8 x NVIDIA H200 SXM" in done.stdout
    written = json.loads((tmp_path / "outputs" / "analysis" / "plan.json").read_text())
    assert written["settings"]["gpus"] == 8
    assert written["settings"]["hardware"]["price_per_hour"] == 2
    assert written["settings"]["model"] == keys_of("model", "moe_m")
    assert written["metrics"]["cost"] == pytest.approx(2 * written["metrics"]["device_hours"])
