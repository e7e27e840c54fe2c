"""The doctor's findings of a model of Hugging Face, as evaluate.py prints and writes them."""

import json

import pytest

from simbal.analysis.balancing import balancing
from simbal.analysis.evaluate import evaluate
from simbal.analysis.quality import quality
from simbal.errors import UserError
from simbal.host.describe import describe
from tests.analysis.hosts import request, saved

BALANCING = {"balancing": {"_target_": "simbal.analysis.balancing.balancing"}}


@pytest.mark.slow
def test_findings_are_those_of_the_doctor_and_the_model_is_left_as_it_was(tmp_path, capsys):
    asked = request(tmp_path, saved(tmp_path, "olmoe"))
    evaluate(BALANCING, None, False, "cpu", asked.output_dir, host=asked)
    written = json.loads((asked.results / "analysis" / "balancing.json").read_text())
    host = asked.load()
    before = quality(host, 256, 4, 2, 0).record["metrics"]
    expected = describe(host.model)
    assert [finding["fact"] for finding in written["findings"]] == [finding.fact for finding in expected.findings]
    assert "off" in {finding["kind"] for finding in written["findings"]}  # output_router_logits is false
    assert "its auxiliary loss is off" in " ".join(capsys.readouterr().out.split())
    assert quality(host, 256, 4, 2, 0).record["metrics"] == before
    assert [finding["fact"] for finding in balancing(host).record["findings"]] == [f.fact for f in expected.findings]


def test_a_run_has_its_balancing_in_its_config(tmp_path):
    with pytest.raises(UserError, match="analysis=balancing works on a model of Hugging Face: give hf=FOLDER"):
        evaluate(BALANCING, str(tmp_path), False, "cpu", str(tmp_path))
