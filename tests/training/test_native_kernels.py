"""Runs with the C kernels agree with torch's operators, repeat their bits, and resume exactly."""

import json

import pytest

from simbal.errors import UserError
from simbal.native import library
from simbal.runs.folder import RunFolder
from simbal.training.run import train
from tests.compiler import needs_compiler
from tests.training.run_files import rows


def losses(spec):
    train(spec)
    return [row["train/loss"] for row in rows(spec) if "train/loss" in row]


@needs_compiler
def test_native_agrees_with_torch_after_60_steps_and_repeats_its_bits(small_spec, tmp_path):
    common = ("trainer.max_steps=60", "trainer.val_every=60", "trainer.log_every=1", "trainer.ckpt_every=60")
    runs = {}
    for name, kernels in (("torch", "torch"), ("native", "native"), ("again", "native")):
        chosen = (f"experts={kernels}", f"model.kernels={kernels}")
        runs[name] = losses(small_spec(*common, *chosen, output_dir=tmp_path / name))
    assert runs["native"] == pytest.approx(runs["torch"], abs=1e-5)
    assert runs["native"] == runs["again"]


def test_without_a_compiler_a_run_uses_torch_and_says_so(small_spec, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load_library.cache_clear()
    try:
        spec = small_spec("trainer.max_steps=2", "trainer.val_every=2")
        train(spec)
        assert "attention and head: auto chose torch: native cannot run here: " in capsys.readouterr().out
        record = RunFolder(spec.path).read_record()
        assert (record["backend"], record["kernels"]) == ("torch", "torch")
        assert "cc is not in PATH" in json.dumps(record["kernels_choice"])
        with pytest.raises(UserError, match=r"model.kernels=native cannot run here: .*cc is not in PATH"):
            train(small_spec("model.kernels=native", "experts=torch"))
    finally:
        library.load_library.cache_clear()


def test_bf16_on_a_cpu_is_noted(small_spec, capsys):
    train(small_spec("trainer.precision=bf16-mixed", "trainer.force_precision=true", "trainer.max_steps=1"))
    assert "note: on a CPU, trainer.precision=bf16-mixed is 1.3 to 1.9 times slower" in capsys.readouterr().out
