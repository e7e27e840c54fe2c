"""A trained run is read back whole, or refused by name."""

import json
import shutil

import pytest
import torch

from simbal.analysis.evaluate import evaluate
from simbal.analysis.trained import load, runs_in
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.run import train
from tests.analysis.module_runs import trained_run

QUALITY = {
    "quality": {
        "_target_": "simbal.analysis.quality.quality", "tokens": None, "batch_size": 16, "resamples": 20, "seed": 0,
    }
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache_dir):
    return trained_run(tmp_path_factory, cache_dir, "balancing=lf_lbl").path


@pytest.fixture
def run(trained, small_spec):
    """A copy of the run, in which a test may change what it likes."""
    spec = small_spec("balancing=lf_lbl")
    shutil.copytree(trained, spec.path)
    return spec


def quality_of(spec, **changes) -> dict:
    evaluate({"quality": QUALITY["quality"] | changes}, str(spec.path), True, "cpu", "unused")
    return json.loads((spec.path / "analysis" / "quality.json").read_text())


def test_the_quality_of_a_run_is_that_of_its_record_and_no_matter_of_batches(run):
    record = RunFolder(run.path).read_record()["metrics"]
    tokens = run.config.data.validation_tokens
    one, other = (quality_of(run, tokens=tokens, batch_size=size)["metrics"] for size in (3, 16))
    assert one["loss"] == pytest.approx(record["val/loss"], rel=1e-6)
    assert one["ppl"] == pytest.approx(record["val/ppl"], rel=1e-6)
    assert one["bpb"] == pytest.approx(record["val/bpb"], rel=1e-6)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["loss_se"] > 0


def test_every_token_of_the_split_is_counted_once_and_belongs_to_a_document(run):
    found, trained = quality_of(run), load(run.path)
    seq_len = run.config.data.seq_len
    assert found["tokens"] == (trained.store.meta["splits"]["validation"]["tokens"] - 1) // seq_len * seq_len
    assert found["documents"] == trained.store.meta["splits"]["validation"]["documents"]
    assert found["settings"]["seed"] == 0
    assert found["seconds"] > 0


def test_precisions_of_training_and_of_the_analysis_are_written_and_said_where_they_differ(run, small_spec, capsys):
    assert quality_of(run)["precision"] == {"trained": "32-true", "analysed": "32-true"}
    assert "analysed in" not in capsys.readouterr().out
    spec = small_spec("trainer.precision=bf16-mixed", "trainer.force_precision=true", "trainer.max_steps=1")
    train(spec)
    assert quality_of(spec)["precision"] == {"trained": "bf16-mixed", "analysed": "32-true"}
    assert "The run was trained in bf16-mixed and is analysed in 32-true." in capsys.readouterr().out


def test_the_model_is_that_of_the_last_step_with_the_strategys_state(run):
    trained = load(run.path)
    saved = torch.load(run.path / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == trained.module.state_dict().keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trained.module.state_dict().items())
    assert saved["balancing.strategies.lf.bias_LE"].any()
    assert not trained.module.training


def test_what_is_there_already_is_not_done_again_unless_told(run, capsys):
    def once(overwrite: bool) -> str:
        evaluate(QUALITY, str(run.path), overwrite, "cpu", "unused")
        return capsys.readouterr().out

    capsys.readouterr()
    assert "written:" in once(False)
    assert "there already:" in once(False)
    assert "written:" in once(True)
    QUALITY_CHANGED = {"quality": QUALITY["quality"] | {"seed": 1}}
    evaluate(QUALITY_CHANGED, str(run.path), False, "cpu", "unused")
    assert "written:" in capsys.readouterr().out


def test_a_folder_of_runs_stands_for_its_finished_ones(run, small_spec):
    other = small_spec("balancing=none")
    train(other)
    unfinished = small_spec("balancing=simbal")
    RunFolder(unfinished.path).write_spec(unfinished)
    assert runs_in(run.path.parent) == sorted([run.path, other.path])
    with pytest.raises(UserError, match="is not finished"):
        load(unfinished.path)


def test_damaged_and_foreign_checkpoints_are_refused_by_name(run, small_spec):
    file = run.path / "checkpoints" / "final.ckpt"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # inside a tensor, where torch.load does not see it
    for content in (whole[:-100], b"", b"no checkpoint", flipped):
        file.write_bytes(content)
        with pytest.raises(UserError, match="final.ckpt is damaged or no checkpoint of simbal"):
            load(run.path)
    other = small_spec("balancing=lf_lbl", "seed=1")  # the same shapes
    train(other)
    file.write_bytes((other.path / "checkpoints" / "final.ckpt").read_bytes())
    with pytest.raises(UserError, match="final.ckpt belongs to another run than the folder that it is in"):
        load(run.path)
    file.unlink()
    with pytest.raises(UserError, match="final.ckpt is missing"):
        load(run.path)
