"""The analysis says of a model in a folder what `describe` says of the model."""

import json

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from simbal.analysis.evaluate import evaluate
from simbal.errors import UserError
from simbal.hf.balancing import balancing
from simbal.hf.describe import describe
from tests.hf.measured import IDS, host_of, request, save, saved

SETTINGS = {"balancing": {"_target_": "simbal.hf.balancing.balancing"}}


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "phimoe"])
def test_it_is_written_and_shown(tmp_path, name, capsys):
    asked = request(tmp_path, saved(tmp_path, name))
    evaluate(SETTINGS, None, False, "cpu", asked.output_dir, hf=asked)
    written = json.loads((tmp_path / "outputs" / "models" / name / "analysis" / "balancing.json").read_text())
    expected = describe(AutoModelForCausalLM.from_pretrained(tmp_path / name))
    assert [(said["kind"], said["fact"]) for said in written["findings"]] == [
        (finding.kind, finding.fact) for finding in expected.findings
    ]
    shown = " ".join(capsys.readouterr().out.split())
    assert ("its auxiliary loss is off" in shown) == (name != "deepseek_v3")


def test_it_is_measured_as_before_afterwards(tmp_path):
    host = host_of(tmp_path, "olmoe")
    before = next(host.predict(1, 1)).nll_BS
    balancing(host)
    assert (next(host.predict(1, 1)).nll_BS == before).all()


def test_a_dense_model_has_nothing_to_balance(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    save(LlamaForCausalLM(LlamaConfig(vocab_size=IDS, **sizes)), tmp_path / "dense")
    asked = request(tmp_path, tmp_path / "dense")
    with pytest.raises(UserError, match="has no router that simbal knows"):
        evaluate(SETTINGS, None, False, "cpu", asked.output_dir, hf=asked)
