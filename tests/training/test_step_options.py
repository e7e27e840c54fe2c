"""What makes a step cheaper changes nothing that is learnt: checkpointing not a bit, torch.compile the rounding."""

import shutil

import pytest
import torch

from simbal.model.transformer import Transformer, TransformerShape
from simbal.runs.folder import RunFolder
from tests.conftest import MARKOV, SMALL
from tests.programs import run
from tests.training.run_files import OTHER_HEADS, weights, without_speed


@pytest.mark.parametrize("choice", [("balancing=lf_lbl",), ("balancing=ortho_param",), ("balancing=lbl", *OTHER_HEADS)])
def test_activation_checkpointing_keeps_every_bit(finished, choice):
    keys = (*choice, "trainer.micro_batch=4", "trainer.pes_every=5")
    plain, again = finished(*keys), finished(*keys, "trainer.activation_checkpointing=true")
    assert without_speed(plain) == without_speed(again)
    other = weights(again)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(plain).items())


def test_activation_checkpointing_keeps_less_for_the_backward_pass(small_spec):
    shape = TransformerShape(64, 4, 32, 2, 16, 4, 2, 1e4, 1e-5, "softmax", True)

    def kept(activation_checkpointing: bool) -> int:
        model = Transformer(shape, "torch", activation_checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(torch.zeros(2, 16, dtype=torch.int64))
        return sum(sizes)

    assert kept(True) < kept(False) / 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_follows_the_same_curve_to_rounding(finished, small_spec, cache_dir, tmp_path):
    """The compiled one is another process: `make test-all` counts the lines of this one by code that dynamo refuses."""
    keys = ("balancing=lf_lbl", "trainer.micro_batch=4", "model.num_layers=1")
    plain, compiled = finished(*keys), small_spec(*keys, "trainer.compile=true", output_dir=tmp_path)
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    done = run("train.py", *SMALL, *MARKOV, *places, *keys, "trainer.compile=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights(plain).keys() == weights(compiled).keys()
    losses = [RunFolder(spec.path).read_record()["metrics"]["val/loss"] for spec in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
