"""A run from its spec to its record: the same bits twice, the same start for every arm, and a record that says so."""

import json
import math

import pytest
import torch

from simbal.data.prepare import prepare
from simbal.errors import UserError
from simbal.metrics.definitions import SETTLING
from simbal.runs.folder import RunFolder
from simbal.training import run
from simbal.training.run import train
from tests.training.run_files import assert_same_run, rows, weights, without_speed


@pytest.mark.parametrize("balancing", ["simbal", "uniform"])  # test_faults has all, each resumed to the same bits
def test_two_runs_with_seed_zero_are_bit_equal_and_another_seed_is_not(small_spec, finished, balancing):
    key = f"balancing={balancing}"
    first, second, other = finished(key), small_spec(key), small_spec(key, "seed=1")
    for spec in (second, other):
        train(spec)
    assert_same_run(first, second)
    assert without_speed(first) != without_speed(other)


def test_a_finished_run_is_not_run_again(finished, monkeypatch, capsys):
    spec = finished()
    record = (spec.path / "record.json").read_bytes()
    monkeypatch.setattr(run, "fit", lambda *_: pytest.fail("trained again"))
    train(spec)
    assert "finished before" in capsys.readouterr().out
    assert (spec.path / "record.json").read_bytes() == record


def test_a_run_is_finished_whether_or_not_somebody_reads_what_it_says_then(small_spec, monkeypatch):
    spec, kept = small_spec(), lambda: [path.name for path in (spec.path / "checkpoints").glob("*")]

    def into_a_pipe(text):
        if "final.ckpt" in kept():
            raise BrokenPipeError

    monkeypatch.setattr(run, "print", into_a_pipe, raising=False)
    monkeypatch.setattr(run, "warn_overclipping", lambda *_: ["nearly all were divided"])
    with pytest.raises(BrokenPipeError):
        train(spec)
    assert RunFolder(spec.path).is_finished(spec)
    assert kept() == ["final.ckpt"]


def test_a_run_finished_on_data_that_have_changed_since_is_refused(small_spec, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    overrides = ("data=files", f"data.files={corpus}", "data.seq_len=16", "data.validation_tokens=64")

    def write(word: str) -> None:
        lines = (json.dumps({"text": f"{word} {number} " * 9}) for number in range(200))
        corpus.write_text("\n".join(lines))

    write("one")
    train(small_spec(*overrides))
    train(small_spec(*overrides))
    write("another")
    with pytest.raises(UserError, match="was trained on other data"):
        train(small_spec(*overrides))


NORMS = ("train/grad_norm", "train/aux_grad_norm", "train/clipped")


@pytest.mark.parametrize(
    ("balancing", "reading"),
    [("simbal", []), ("lbl", []), ("lbl", ["balancing.lbl.scope=global"]), ("lf", []), ("uniform", [])],
)
def test_accumulation_changes_losses_by_rounding_only(small_spec, finished, balancing, reading):
    keys = (f"balancing={balancing}", *reading)
    whole, parts = finished(*keys), small_spec(*keys, "trainer.micro_batch=2")
    train(parts)
    for one, other in zip(rows(whole), rows(parts), strict=True):
        for key in one.keys() & {"train/loss", "train/ce", f"train/aux/{balancing}", *NORMS, "val/loss"}:
            assert one[key] == pytest.approx(other[key], rel=1e-4), (key, one["step"])
        if "train/max_vio" in one:  # counts are summed over the micro-batches
            assert one["train/max_vio"] == pytest.approx(other["train/max_vio"], abs=0.05)


def test_arms_start_from_the_same_weights_and_see_the_same_data(small_spec):
    keys = ("router.init=normal", "trainer.max_steps=2")
    arms = [small_spec(f"balancing={name}", *keys) for name in ("none", "lbl", "simbal")]
    for spec in arms:
        train(spec)
    starts = [next(row for row in rows(spec) if row["step"] == 0) for spec in arms]
    assert starts[0] == starts[1] == starts[2]


def test_auxiliary_losses_stay_out_of_the_validation_loss(finished):
    weak, strong = (finished("balancing=lbl", f"balancing.lbl.coef={coef}") for coef in (0, 10))
    assert rows(weak)[0]["val/loss"] == rows(strong)[0]["val/loss"]
    assert rows(strong)[1]["train/loss"] > rows(strong)[1]["train/ce"] + 10


def test_coefficient_zero_is_no_balancing_to_the_bit(finished):
    none, zero = finished("balancing=none"), finished("balancing=lbl", "balancing.lbl.coef=0")
    other = weights(zero)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(none).items())


def test_a_markov_chain_is_learnt_but_never_beyond_its_entropy(small_spec):
    spec = small_spec("trainer.max_steps=100", "trainer.val_every=50", "model.d_model=32", "data.documents=512")
    train(spec)
    record = RunFolder(spec.path).read_record()
    assert math.log(4) - 0.05 < record["metrics"]["val/loss"] < 0.7 * math.log(64)
    assert record["metrics"]["val/ppl"] == pytest.approx(math.exp(record["metrics"]["val/loss"]))
    assert record["metrics"]["val/bpb"] == pytest.approx(record["metrics"]["val/loss"] / math.log(2), rel=0.02)


def test_the_record_says_what_ran(finished):
    spec = finished("balancing=simbal")
    record = RunFolder(spec.path).read_record()
    assert (record["status"], record["config_hash"], record["seed"]) == ("finished", spec.hash, 0)
    assert (record["backend"], record["precision"], record["router_init"]) == ("torch", "32-true", "orthogonal")
    assert (record["steps"], record["tokens"]) == (12, 12 * 8 * 16)
    of_training = len(prepare(spec.config.data, progress=False).tokens("train")) - 1
    assert record["epochs"] == 12 / (of_training // 16 // 8)
    assert record["seconds"] < 60
    assert record["objective"]["simbal"] == {
        "formula": "coef * sum_ij |W W^T - I|_ij, product in fp32",
        "citation": "arXiv 2506.14038, section 3.1",
        "properties": {
            "differentiable": True, "scope": "weights", "causal": True, "revives_dead_experts": False,
            "equivariant": True, "mixes_layers": False,
        },
        "coef": 0.1, "schedule": [[0, 1.0]], "over_layers": "sum", "effective_coef": 0.2,
        "unit": "the formula in one layer",
    }  # fmt: skip
    assert len(record["layers"]["val/max_vio"]) == 2
    others = {"tokens_per_second", "val/tokens_per_expert", *(metric.key for metric in SETTLING)}  # of longer runs
    assert set(record["metrics"]) | others == set(record["definitions"])
    assert record["tokens_per_second"] > 0
    assert RunFolder(spec.path).read_spec() == spec
    assert [row["step"] for row in rows(spec) if "val/loss" in row] == [0, 6, 12]
    assert [row["step"] for row in rows(spec) if "train/ce" in row] == [2, 4, 6, 8, 10, 12]
    assert [path.name for path in (spec.path / "checkpoints").iterdir()] == ["final.ckpt"]


def test_a_run_says_at_its_start_what_it_minimises(small_spec, capsys):
    spec = small_spec("balancing=lf_lbl", "balancing.lbl.schedule=[[0,1],[6,0.5]]", "optim.warmup_steps=12")
    train(spec)
    shown = capsys.readouterr().out
    assert "lf: no loss; choice by logits + b" in shown
    assert "lbl: coef * E * sum_i f_i P_i" in shown
    assert "  coef 0.01 times 1 at step 0, 0.5 at step 6, sum over layers: effective coefficient 0.04 of OLMoE" in shown
    assert "trainer.max_steps=12 ends within optim.warmup_steps=12" in shown
    assert "effective coefficient 0.04" in (spec.path / "train.log").read_text()


def test_a_schedule_that_has_reached_zero_leaves_no_loss(small_spec):
    spec = small_spec("balancing=lbl", "balancing.lbl.schedule=[[0,1],[6,0]]")
    train(spec)
    terms = {row["step"]: row["train/aux/lbl"] for row in rows(spec) if "train/aux/lbl" in row}
    assert terms[4] == pytest.approx(terms[2] / 5 * 3, rel=0.1)  # steps 1 and 3 of 6
    assert terms[8] == terms[12] == 0


def test_an_orthogonal_parametrization_stays_orthogonal_under_weight_decay(small_spec):
    spec = small_spec("balancing=ortho_param", "optim.weight_decay=10", "router.init=normal")
    train(spec)
    assert rows(spec)[-1]["val/gram_deviation"] < 1e-6
    start, end = (next(row for row in each if "val/loss" in row) for each in (rows(spec), rows(spec)[::-1]))
    assert start["val/loss"] > end["val/loss"]


def test_loss_free_bias_moves_once_per_optimizer_step_and_is_in_the_checkpoint(small_spec):
    spec = small_spec("balancing=lf", "trainer.micro_batch=2", "balancing.lf.update_rate=0.5")
    train(spec)
    bias_LE = weights(spec)["balancing.strategies.lf.bias_LE"]
    assert bias_LE.any()
    assert ((2 * bias_LE) == (2 * bias_LE).round()).all()
    assert bias_LE.abs().max() <= 12 * 0.5


@pytest.mark.parametrize("balancing", ["lf", "ortho_param", "ortho_mix"])
def test_a_bf16_model_keeps_the_strategys_numbers_in_fp32(small_spec, balancing):
    bf16 = ("trainer.precision=bf16-true", "trainer.force_precision=true")
    spec = small_spec(f"balancing={balancing}", *bf16, "trainer.max_steps=4")
    train(spec)
    saved = {name: tensor.dtype for name, tensor in weights(spec).items() if tensor.is_floating_point()}
    fp32 = {name for name, dtype in saved.items() if dtype == torch.float32}
    assert fp32 == {name for name in saved if "lf.bias" in name or "parametrizations" in name}
    assert len(fp32) == {"lf": 1, "ortho_param": 2, "ortho_mix": 4}[balancing]
    assert rows(spec)[-1]["val/gram_deviation"] < 1e-6 or balancing != "ortho_param"


def test_a_last_step_between_two_validations_is_validated_too(small_spec):
    spec = small_spec("trainer.max_steps=10", "trainer.val_every=4")
    train(spec)
    assert [row["step"] for row in rows(spec) if "val/loss" in row] == [0, 4, 8, 10]


def test_a_dense_model_has_no_routing_numbers(small_spec):
    spec = small_spec("model.num_experts=0", "model.top_k=0", "balancing=none")
    train(spec)
    metrics = RunFolder(spec.path).read_record()["metrics"]
    assert metrics["val/loss"] > 0
    assert metrics["val/max_vio"] is metrics["val/seu"] is metrics["val/gram_deviation"] is None
