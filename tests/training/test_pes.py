"""PES is measured while a run trains, and the run does not notice."""

import pytest
import torch

from simbal.analysis.redundancy import redundancy
from simbal.analysis.trained import load
from simbal.training.run import train
from simbal.training.callbacks import MetricsLogger
from tests.training.run_files import rows, weights, without_speed

PES_KEYS = ("val/min_pes", "val/mean_pes")


class KilledError(BaseException):
    """Not an Exception: nothing on the way records a failure."""


def without_pes(spec) -> list[dict]:
    kept = []
    for row in without_speed(spec):
        dropped = (*PES_KEYS, "layers") if "val/min_pes" in row else ()
        kept.append({key: value for key, value in row.items() if key not in dropped})
    return [row for row in kept if row.keys() != {"step", "tokens"}]


def pes_rows(spec) -> list[dict]:
    return [row for row in rows(spec) if "val/min_pes" in row]


@pytest.mark.parametrize(
    ("balancing", "micro_batch"), [("lf_lbl", 4), ("uniform", 8), ("sinkhorn", 4), ("ortho_param", 8)]
)
def test_a_run_that_is_measured_is_bit_equal_to_one_that_is_not(small_spec, balancing, micro_batch):
    keys = (f"balancing={balancing}", f"trainer.micro_batch={micro_batch}")
    plain, measured = small_spec(*keys), small_spec(*keys, "trainer.pes_every=3", "trainer.pes_tokens=40")
    states = []
    for spec in (plain, measured):
        torch.manual_seed(0)
        train(spec)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert without_pes(measured) == without_speed(plain)
    assert not pes_rows(plain)
    other = weights(plain)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(measured).items())


def test_a_measured_optimizer_is_bit_equal_too(small_spec, monkeypatch, tmp_path):
    checkpoints = []
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # the last periodic checkpoint stays
    for every in (0, 3):
        spec = small_spec(f"trainer.pes_every={every}", output_dir=tmp_path / str(every))
        train(spec)
        file = spec.path / "checkpoints" / "step-00000012.ckpt"
        checkpoints.append(torch.load(file, weights_only=True)["optimizer_states"][0]["state"])
    first, second = checkpoints
    assert first.keys() == second.keys()
    assert all(torch.equal(first[i][key], second[i][key]) for i in first for key in ("exp_avg", "exp_avg_sq", "step"))


def test_rows_of_their_steps_hold_every_layer(finished):
    spec = finished("trainer.pes_every=3")
    measured = pes_rows(spec)
    assert [row["step"] for row in measured] == [0, 3, 6, 9, 12]
    assert [row["tokens"] for row in measured] == [0, 384, 768, 1152, 1536]
    assert ["train/loss" in row for row in measured] == [False, False, True, False, True]  # every second is logged
    for row in measured:
        assert row["val/min_pes"] == min(row["layers"]["val/pes"])
        assert row["val/mean_pes"] == pytest.approx(sum(row["layers"]["val/pes"]) / 2)
    assert measured[0]["val/min_pes"] != measured[-1]["val/min_pes"]


def test_the_last_row_is_what_the_analysis_finds(small_spec):
    spec = small_spec("trainer.pes_every=12", "trainer.pes_tokens=160", "trainer.micro_batch=4")
    train(spec)
    found = redundancy(load(spec.path), 160, 16).record
    assert pes_rows(spec)[-1]["layers"]["val/pes"] == pytest.approx(found["layers"]["pes"], rel=1e-4)


@pytest.mark.parametrize("step", [0, 3, 6, 11])
def test_a_killed_run_goes_on_without_gap_or_duplicate(small_spec, finished, monkeypatch, step):
    whole, broken = finished("trainer.pes_every=3"), small_spec("trainer.pes_every=3")
    original = MetricsLogger.on_train_batch_start

    def start(self, trainer, *rest):
        original(self, trainer, *rest)
        if trainer.global_step == step:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "on_train_batch_start", start)
        with pytest.raises(KilledError):
            train(broken)
    train(broken)
    assert without_speed(whole) == without_speed(broken)


def test_a_dense_model_has_no_pes(small_spec):
    spec = small_spec("trainer.pes_every=3", "balancing=none", "model.num_experts=0")
    train(spec)
    assert not pes_rows(spec)


def test_the_record_has_the_similarity_of_the_final_weights_and_its_definition(small_spec):
    spec = small_spec("trainer.pes_every=5", "trainer.pes_tokens=512")
    train(spec)
    trained = load(spec.path, "cpu")
    found = redundancy(trained, tokens=None, batch_size=8).record["metrics"]
    metrics, definitions = trained.record["metrics"], trained.record["definitions"]
    assert metrics["val/min_pes"] == pytest.approx(found["min_pes"])
    assert metrics["val/mean_pes"] == pytest.approx(found["mean_pes"])
    assert definitions["val/min_pes"].startswith("smallest PES of the layers")
    assert len(trained.record["layers"]["val/pes"]) == 2
