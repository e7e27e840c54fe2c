"""What a plan refuses, what else refuses its keys, and its command line as a user gives it."""

import json
import re

import pytest

from simbal.analysis.evaluate import evaluate
from simbal.errors import UserError
from tests.analysis.plans import keys_of, planned
from tests.in_process import run


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpus": 0}, "gpus=0 must be a whole number of at least 1"),
        ({"gpus": 1.5}, "gpus=1.5 must be a whole number of at least 1"),
        ({"gpus": 1024}, "gpus=1024 cannot share the 512 sequences"),
        ({"steps": 0}, "analysis.plan.steps=0 must be a whole number of at least 1"),
        ({"runs": 0}, "analysis.plan.runs=0 must be a whole number of at least 1"),
        ({"at_once": 1.5}, "analysis.plan.at_once=1.5 must be a whole number of at least 1"),
        ({"utilisation": 0}, "analysis.plan.utilisation=0 must be above 0 and at most 1"),
        ({"utilisation": 1.1}, "analysis.plan.utilisation=1.1 must be above 0 and at most 1"),
        ({"tokens_per_second": 0}, "analysis.plan.tokens_per_second=0 must be above 0"),
        ({"memory_share": 2}, "analysis.plan.memory_share=2 must be above 0 and at most 1"),
        ({"price_per_hour": -1}, "hardware.price_per_hour=-1 must be at least 0"),
        ({"fp32_flops": "fast"}, "hardware.fp32_flops=fast must be a number"),
        ({"top_k": 33}, "model.top_k=33 must be between 1 and model.num_experts=32"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"d_model": "wide"}, "model.d_model=wide must be an integer"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_is_allowed(change, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        planned(**change)


@pytest.mark.parametrize("key", ["model", "hardware", "gpus"])
def test_its_keys_are_refused_by_other_analyses(tmp_path, key):
    settings = {"_target_": "simbal.analysis.orthogonality.orthogonality"}
    with pytest.raises(UserError, match=f"^{key}= is not for analysis=orthogonality: leave it out$"):
        evaluate({"orthogonality": settings}, None, False, "cpu", str(tmp_path), {key: 1})
    assert not [*tmp_path.iterdir()]


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
