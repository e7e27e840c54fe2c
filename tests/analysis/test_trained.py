"""Finished runs load with their weights and data, or the error names the missing part."""

import json
import shutil

import pytest
import torch

from simbal.analysis.evaluate import evaluate
from simbal.analysis.trained import DataPlaces, find_runs, load
from simbal.data.store import find
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.run import train
from tests.forged_runs import forge
from tests.in_process import run as run_program

QUALITY = {
    "_target_": "simbal.analysis.quality.quality", "tokens": None, "batch_size": 16, "resamples": 20, "seed": 0,
}  # fmt: skip


@pytest.fixture
def run(trained, small_spec):
    """A copy of a run, which a test may modify."""
    spec = small_spec("balancing=lf_lbl", "trainer.max_steps=4")
    shutil.copytree(trained("balancing=lf_lbl").path, spec.path)
    return spec


def quality_of(spec, **changes) -> dict:
    evaluate({"quality": QUALITY | changes}, str(spec.path), True, "cpu", "unused")
    return json.loads((spec.path / "analysis" / "quality.json").read_text())


def test_quality_equals_the_runs_record_in_any_batch_size(run):
    record = RunFolder(run.path).read_record()["metrics"]
    found = quality_of(run)
    split = load(run.path).store.meta["splits"]["validation"]
    assert found["tokens"] == (split["tokens"] - 1) // run.config.data.seq_len * run.config.data.seq_len
    assert found["documents"] == split["documents"]
    for batch_size in (3, 16):
        metrics = quality_of(run, tokens=run.config.data.validation_tokens, batch_size=batch_size)["metrics"]
        for name in ("loss", "ppl", "bpb"):
            assert metrics[name] == pytest.approx(record[f"val/{name}"], rel=1e-6)
        assert metrics["loss_se"] > 0


def test_precisions_of_training_and_analysis_are_saved_and_printed_if_they_differ(run, small_spec, capsys):
    assert quality_of(run)["precision"] == {"trained": "32-true", "analyzed": "32-true"}
    assert "analyzed in" not in capsys.readouterr().out
    spec = small_spec("trainer.precision=bf16-mixed", "trainer.force_precision=true", "trainer.max_steps=1")
    train(spec)
    assert quality_of(spec)["precision"] == {"trained": "bf16-mixed", "analyzed": "32-true"}
    assert "The run was trained in bf16-mixed and is analyzed in 32-true." in capsys.readouterr().out


def test_the_model_has_the_final_weights_and_the_strategys_state(run):
    trained = load(run.path)
    saved = torch.load(run.path / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == trained.module.state_dict().keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trained.module.state_dict().items())
    assert saved["balancing.strategies.lf.bias_LE"].any()
    assert not trained.module.training


def test_an_existing_result_is_kept_unless_overwrite_or_its_settings_differ(run, capsys):
    for overwrite, seed, expected in (
        (False, 0, "written:"), (False, 0, "already exists:"), (True, 0, "written:"), (False, 1, "written:"),
    ):  # fmt: skip
        evaluate({"quality": QUALITY | {"seed": seed}}, str(run.path), overwrite, "cpu", "unused")
        assert expected in capsys.readouterr().out


def test_a_folder_of_runs_means_its_finished_runs(run, small_spec):
    other = small_spec("balancing=none")
    train(other)
    unfinished = small_spec("balancing=simbal")
    RunFolder(unfinished.path).write_spec(unfinished)
    assert find_runs(run.path.parent) == sorted([run.path, other.path])
    with pytest.raises(UserError, match="is not finished"):
        load(unfinished.path)


def test_damaged_and_wrong_checkpoints_are_rejected(run, small_spec):
    file = run.path / "checkpoints" / "final.ckpt"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # inside a tensor, where torch.load does not see it
    for content in (whole[:-100], b"", b"no checkpoint", flipped):
        file.write_bytes(content)
        with pytest.raises(UserError, match="final.ckpt is damaged or not a checkpoint of simbal"):
            load(run.path)
    other = small_spec("balancing=lf_lbl", "seed=1", "trainer.max_steps=1")  # the same shapes
    train(other)
    file.write_bytes((other.path / "checkpoints" / "final.ckpt").read_bytes())
    with pytest.raises(UserError, match="final.ckpt was not saved by the run"):
        load(run.path)
    file.unlink()
    with pytest.raises(UserError, match="final.ckpt does not exist"):
        load(run.path)


@pytest.fixture
def moved(text_run, tmp_path):
    """A copy of a run on text whose config names a cache that does not exist."""
    path = shutil.copytree(text_run.path, tmp_path / "run")
    forge(path, "data.cache_dir", str(tmp_path / "theirs"))
    return path


def test_missing_data_are_reported_and_nothing_is_fetched_or_created(moved, tmp_path):
    forge(moved, "data.files", "http://localhost:9/corpus.txt")
    (tmp_path / "here").mkdir()
    done = run_program(tmp_path / "here", "evaluate.py", f"run={moved}", "analysis=[quality,generate]")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: the data of {moved} (data=files, tokens ")
    assert f"are not in .cache/data or {tmp_path / 'theirs'}: run `python prepare.py data=files " in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run", "here"}
    assert not [*(tmp_path / "here").iterdir()]


def test_text_that_the_user_gives_is_prepared_in_the_users_cache_and_compared(moved, text_run, tmp_path):
    text, cache = text_run.path.parents[2] / "corpus.txt", tmp_path / "mine"
    places = DataPlaces(cache_dir=str(cache), files=str(text))
    tokens = load(moved, "cpu", places).store.fingerprints["tokens"]
    assert find(cache, tokens, remember=False) is not None
    assert not (tmp_path / "theirs").exists()
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"another text {number}" for number in range(200)))
    with pytest.raises(UserError, match=rf"data.files= is not the text that {moved} was trained on .*{tokens[:12]}"):
        load(moved, "cpu", DataPlaces(cache_dir=str(tmp_path / "second"), files=str(other)))


def test_an_analysis_uses_the_users_tokenizer(moved, text_run, tmp_path):
    keys = ("analysis=generate", "data.tokenizer_path=mine", f"data.cache_dir={text_run.config.data.cache_dir}")
    done = run_program(tmp_path, "evaluate.py", f"run={moved}", *keys)
    assert done.returncode == 1
    assert "mine" in done.stderr
