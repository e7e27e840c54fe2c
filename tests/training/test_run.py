"""A run from its config to its record: reproducibility, equal initial weights for all arms, and a complete record."""

import json
import math
import subprocess

import pytest
import torch

from simbal.analysis.quality import document_sums
from simbal.analysis.trained import load
from simbal.data.prepare import prepare
from simbal.errors import UserError
from simbal.metrics.definitions import SETTLING
from simbal.runs.folder import RunFolder
from simbal.training import record as run_record
from simbal.training import run
from simbal.training.run import train
from tests.analysis.text_run import text_spec
from tests.training.run_files import assert_same_run, assert_same_weights, checkpoints, rows, weights, without_speed


def test_the_seed_determines_every_bit(small_spec, finished):
    key = "balancing=uniform"
    first, second, other = finished(key), small_spec(key), small_spec(key, "seed=1")
    for spec in (second, other):
        train(spec)
    assert_same_run(first, second)
    assert without_speed(first) != without_speed(other)


def test_data_seed_determines_the_order_of_the_data(small_spec):
    specs = [small_spec("trainer.max_steps=2", "seed=3", *more) for more in ((), ("data.seed=3",), ("data.seed=4",))]
    for spec in specs:
        train(spec)
    plain, same, crossed = [[row["val/loss"] for row in rows(spec, "val/loss")] for spec in specs]
    assert plain == same != crossed


def test_a_finished_run_is_not_trained_again(finished, monkeypatch, capsys):
    spec = finished()
    record = (spec.path / "record.json").read_bytes()
    monkeypatch.setattr(run, "fit", lambda *_: pytest.fail("trained again"))
    train(spec)
    assert "finished before" in capsys.readouterr().out
    assert (spec.path / "record.json").read_bytes() == record


def test_a_run_finished_on_other_data_is_refused(small_spec, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    keys = ("data=files", f"data.files={corpus}", "data.seq_len=16", "data.validation_tokens=64", "trainer.max_steps=1")
    for word in ("one", "another"):
        lines = (json.dumps({"text": f"{word} {number} " * 9}) for number in range(200))
        corpus.write_text("\n".join(lines))
        if word == "one":
            train(small_spec(*keys))
    with pytest.raises(UserError, match="was trained on other data"):
        train(small_spec(*keys))


@pytest.mark.parametrize("keys", [("simbal",), ("lbl", "balancing.lbl.scope=global"), ("lf",)])
def test_accumulation_changes_losses_by_rounding_only(small_spec, finished, keys):
    balancing = f"balancing={keys[0]}"
    full, parts = finished(balancing, *keys[1:]), small_spec(balancing, *keys[1:], "trainer.micro_batch=2")
    train(parts)
    compared = {"train/loss", "train/ce", f"train/aux/{keys[0]}", "train/grad_norm", "train/aux_grad_norm", "val/loss"}
    for one, other in zip(rows(full), rows(parts), strict=True):
        for key in one.keys() & compared:
            assert one[key] == pytest.approx(other[key], rel=1e-4), (key, one["step"])
        if "train/max_vio" in one:  # counts are summed over micro-batches
            assert one["train/max_vio"] == pytest.approx(other["train/max_vio"], abs=0.05)


def test_arms_start_from_the_same_weights_and_data(small_spec):
    arms = [small_spec(f"balancing={name}", "router.init=normal", "trainer.max_steps=1") for name in ("none", "simbal")]
    for spec in arms:
        train(spec)
    assert rows(arms[0], "val/loss")[0] == rows(arms[1], "val/loss")[0]


def test_auxiliary_losses_are_not_in_the_validation_loss(finished):
    none, zero, strong = (
        finished(*keys)
        for keys in (["balancing=none"], *(["balancing=lbl", f"balancing.lbl.coef={c}"] for c in (0, 10)))
    )
    assert_same_weights(none, zero)
    assert rows(zero)[0]["val/loss"] == rows(strong)[0]["val/loss"]
    assert rows(strong)[1]["train/loss"] > rows(strong)[1]["train/ce"] + 10


def test_a_markov_chain_is_learned_down_to_its_entropy_and_no_further(small_spec):
    spec = small_spec("trainer.max_steps=60", "trainer.val_every=60", "optim.lr=2e-2", "data.documents=512")
    train(spec)
    metrics = RunFolder(spec.path).read_record()["metrics"]
    assert math.log(4) - 0.05 < metrics["val/loss"] < 0.9 * math.log(64)
    assert metrics["val/ppl"] == pytest.approx(math.exp(metrics["val/loss"]))
    assert metrics["val/bpb"] == pytest.approx(metrics["val/loss"] / math.log(2), rel=0.02)


def test_the_record_describes_the_run(finished):
    spec = finished("balancing=simbal")
    record = RunFolder(spec.path).read_record()
    assert (record["status"], record["config_hash"], record["seed"]) == ("finished", spec.hash, 0)
    assert (record["precision"], record["router_init"]) == ("32-true", "orthogonal")
    assert record["backend"] == record["kernels"]
    assert record["kernels"] in ("native", "torch")
    assert (record["steps"], record["tokens"]) == (12, 12 * 8 * 16)
    training_tokens = len(prepare(spec.config.data, progress=False).tokens("train")) - 1
    assert record["epochs"] == 12 / (training_tokens // 16 // 8)
    objective = record["objective"]["simbal"]
    assert (objective["coef"], objective["over_layers"], objective["effective_coef"]) == (0.1, "sum", 0.2)
    assert objective["schedule"] == [[0, 1.0]]
    assert len(record["layers"]["val/max_vio"]) == 2
    others = {"tokens_per_second", "val/tokens_per_expert", *(metric.key for metric in SETTLING)}  # of longer runs
    assert set(record["metrics"]) | others == set(record["definitions"])
    assert record["tokens_per_second"] > 0
    assert RunFolder(spec.path).read_spec() == spec
    assert [row["step"] for row in rows(spec, "val/loss")] == [0, 6, 12]
    assert [row["step"] for row in rows(spec, "train/ce")] == [2, 4, 6, 8, 10, 12]
    assert checkpoints(spec) == ["final.ckpt"]


def test_a_run_prints_its_objective_when_it_starts(small_spec, capsys):
    keys = ("balancing=lf_lbl", "balancing.lbl.schedule=[[0,1],[2,0]]", "optim.warmup_steps=4", "trainer.max_steps=4")
    spec = small_spec(*keys)
    train(spec)
    printed = capsys.readouterr().out
    assert "lbl: coef * E * sum_i f_i P_i" in printed
    assert "coef 0.01 times 1 at step 0, 0 at step 2, sum over layers: effective coefficient 0.04 of OLMoE" in printed
    assert "peak learning rate is never reached" in printed
    assert "effective coefficient 0.04" in (spec.path / "train.log").read_text()
    assert rows(spec, "train/aux/lbl")[-1]["train/aux/lbl"] == 0  # the schedule has reached 0


def test_a_router_without_a_gradient_from_the_language_model_loss_is_noted(small_spec, capsys):
    train(small_spec("model.top_k=1", "trainer.max_steps=1"))
    train(small_spec("model.top_k=1", "router.renormalize=false", "trainer.max_steps=1"))
    assert capsys.readouterr().out.count("the router no gradient") == 1


@pytest.mark.parametrize("balancing", ["lf", "ortho_mix"])
def test_a_bf16_model_keeps_the_state_of_strategies_in_fp32(small_spec, balancing):
    bf16 = ("trainer.precision=bf16-true", "trainer.force_precision=true")
    spec = small_spec(f"balancing={balancing}", *bf16, "trainer.max_steps=2")
    train(spec)
    saved = {name: tensor.dtype for name, tensor in weights(spec).items() if tensor.is_floating_point()}
    fp32 = {name for name, dtype in saved.items() if dtype == torch.float32}
    assert fp32 == {name for name in saved if "lf.bias" in name or "parametrizations" in name}
    assert len(fp32) == {"lf": 1, "ortho_mix": 4}[balancing]


def test_a_dense_model_has_no_routing_metrics(small_spec):
    spec = small_spec(
        "model.num_experts=0", "model.top_k=0", "balancing=none", "trainer.pes_every=1", "trainer.max_steps=1"
    )
    train(spec)
    metrics = RunFolder(spec.path).read_record()["metrics"]
    assert metrics["val/loss"] > 0
    assert metrics["val/max_vio"] is metrics["val/seu"] is metrics["val/gram_deviation"] is None
    assert not rows(spec, "val/min_pes")


def test_early_validations_are_spaced_by_doubling_and_the_last_step_is_validated(small_spec):
    spec = small_spec("trainer.val_at=log", "trainer.val_every=10", "trainer.micro_batch=4")
    train(spec)
    assert [row["step"] for row in rows(spec, "val/loss")] == [0, 1, 2, 4, 8, 10, 12]


def test_the_record_covers_the_whole_validation_split_and_the_curve_a_sample(small_spec):
    keys = ("data.validation_tokens=64", "data.validation_tokens=null", "data.validation_document_tokens=32")
    sample, full, heads = (small_spec(key, "trainer.max_steps=1") for key in keys)
    for spec in (sample, full, heads):
        train(spec)
    metrics = [RunFolder(spec.path).read_record()["metrics"] for spec in (sample, full)]
    assert metrics[0] == metrics[1]
    last_rows = [rows(spec, "val/loss")[-1]["val/loss"] for spec in (sample, full)]
    assert last_rows[0] != metrics[0]["val/loss"] == last_rows[1]
    tokens = [json.loads((spec.path / "documents.json").read_text())["tokens"] for spec in (heads, full)]
    assert sum(tokens[0]) < sum(tokens[1])
    assert len(tokens[0]) == len(tokens[1])


def test_documents_json_agrees_with_the_analysis_and_the_record(tmp_path):
    spec = text_spec(tmp_path)
    train(spec)
    file = spec.path / "documents.json"
    written, trained = json.loads(file.read_text()), load(spec.path, "cpu")
    nats, tokens, num_bytes = document_sums(trained, None, 8).T.tolist()
    seen = [place for place, count in enumerate(written["tokens"]) if count]
    assert len(seen) > 3
    assert [written["nats"][place] for place in seen] == pytest.approx(nats, rel=1e-5)
    assert [written["tokens"][place] for place in seen] == tokens
    assert [written["bytes"][place] for place in seen] == num_bytes
    loss = math.fsum(written["nats"]) / sum(written["tokens"])
    assert loss == pytest.approx(trained.record["metrics"]["val/loss"], rel=1e-12)
    file.write_text(file.read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match="documents.json"):
        RunFolder(spec.path).read_record()


def test_the_recorded_commit_is_of_the_files_that_run(tmp_path, monkeypatch):
    """Not of a repository that contains an environment in which the package is installed."""
    (tmp_path / "tracked.py").write_text("")
    (tmp_path / "untracked.py").write_text("")
    git = ("git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    for arguments in (["init", "-q"], ["add", "tracked.py"], ["commit", "-qm", "a commit"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(run_record, "__file__", str(tmp_path / "tracked.py"))
    version = run_record.code_version()
    assert (len(version["commit"]), version["dirty"]) == (40, True)
    monkeypatch.setattr(run_record, "__file__", str(tmp_path / "untracked.py"))
    assert run_record.code_version()["commit"] is None
