"""The model card says what the record says, and nothing in it is markup of others."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.shared.trained import TrainedRun
from simbal.hub.card import block, code, model_card
from simbal.hub.finished_run import FinishedRun
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec

HOSTILE = "`` <script>alert(1)</script> ![x](http://x/y.png) [x](javascript:1) `\n```\n# heading\n---\n| a |"


def finished(run: TrainedRun, **record) -> FinishedRun:
    return FinishedRun(run.path, run.spec, RunFolder(run.path).read_record() | record, run.model)


def outside_code(markdown: str) -> str:
    """What a reader of CommonMark does not take for code: fences first, then spans, each closed by as many ticks."""
    fence = r"^(`{3,})\n.*?^\1$"
    without = re.sub(fence, "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", without)


def test_the_card_has_everything_that_the_record_knows(text_run):
    record = RunFolder(text_run.path).read_record()
    card = model_card(finished(text_run), "There is one.")
    for part in (
        "`MixtralForCausalLM`", "4 experts of width 8", "12 steps, 1,536 tokens, seed 0", record["data"]["tokens"],
        record["data"]["text"], record["code"]["version"], str(record["code"]["commit"]), record["config_hash"],
        record["versions"]["torch"], record["objective"]["simbal"]["formula"], "its coefficient `0.1`", "There is one.",
        "balancing.simbal.coef=0.1", "optim.lr=0.01", "library_name: transformers",
    ):  # fmt: skip
        assert part in card, part
    for name, value in record["metrics"].items():
        assert f"- `{name}` = {value:.6g}: `{record['definitions'][name]}`" in card
    assert "cache_dir" not in card
    assert "output_dir" not in card


def test_a_dense_model_has_no_words_on_experts(run_of):
    card = model_card(finished(run_of("balancing=none", "model.num_experts=0")), "")
    assert "`LlamaForCausalLM`" in card
    assert "experts of width" not in card
    assert "val/max_vio" not in card


def test_nothing_hostile_in_a_record_or_config_is_markup(text_run):
    run = finished(text_run)
    record = run.record | {
        "objective": {HOSTILE: {"formula": HOSTILE, "citation": HOSTILE, "coef": HOSTILE, "unit": HOSTILE}},
        "versions": {HOSTILE: HOSTILE}, "code": {"version": HOSTILE, "commit": HOSTILE}, "warnings": [HOSTILE],
        "metrics": {HOSTILE: 1.0}, "definitions": {HOSTILE: HOSTILE}, "device": HOSTILE,
        "data": {"tokens": HOSTILE, "text": HOSTILE, "source": HOSTILE},
    }  # fmt: skip
    written = run.spec.written | {"data": run.spec.written["data"] | {"files": HOSTILE, HOSTILE: HOSTILE}}
    spec = RunSpec.saved(written, run.spec.choices, run.spec.path)
    card = model_card(dataclasses.replace(run, record=record, spec=spec, path=run.path.with_name("a`b<i>")), "")
    assert card.count("script") > 10
    shown = outside_code(card)
    for word in ("script", "javascript", "heading", "http", "<i>"):
        assert word not in shown, word
    assert [line for line in shown.splitlines() if line.startswith("---")] == ["---", "---"]  # of the front matter


@given(text=st.text(alphabet="`a \n|<\\~"))
def test_code_shows_any_text_on_one_line(text):
    shown = code(text)
    assert "\n" not in shown
    assert outside_code(f"x {shown} y").split() == ["x", "y"]


@given(lines=st.lists(st.text(alphabet="`a \n~", max_size=8), min_size=1, max_size=4))
def test_a_block_holds_any_lines(lines):
    assert outside_code(block(lines)).strip() == ""


@pytest.mark.parametrize(("text", "shown"), [("a", "`a`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("", "` `")])
def test_code_takes_the_fewest_ticks_that_do(text, shown):
    assert code(text) == shown
