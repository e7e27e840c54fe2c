"""The model card says what the record says, and nothing in it is markup of others."""

from simbal.analysis.shared.trained import TrainedRun
from simbal.hub.card import model_card
from simbal.hub.finished_run import FinishedRun
from simbal.runs.folder import RunFolder


def finished(run: TrainedRun, **record) -> FinishedRun:
    return FinishedRun(run.path, run.spec, RunFolder(run.path).read_record() | record, run.model)


def test_the_card_has_everything_that_the_record_knows(text_run):
    record = RunFolder(text_run.path).read_record()
    card = model_card(finished(text_run), "There is one.")
    for part in (
        "`MixtralForCausalLM`", "4 experts of width 8", "12 steps, 1,536 tokens, seed 0",
        record["code"]["version"], str(record["code"]["commit"]), record["config_hash"],
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
