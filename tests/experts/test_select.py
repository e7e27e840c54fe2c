"""A named backend runs or says why not; `auto` goes by what was measured, and says what it passed over."""

import json

import pytest
import torch

from simbal.errors import UserError
from simbal.experts import select
from simbal.experts.select import BACKENDS, TABLE, UNMEASURED, Backend, choose
from simbal.model.init import initialise
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.run import train
from tests.experts.test_megablocks import needs_megablocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def all_run(monkeypatch):
    """Every backend can run everywhere, as on a GPU with everything installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, Backend(backend.run, lambda *_: None))


def refuse(monkeypatch, name, reason):
    monkeypatch.setitem(BACKENDS, name, Backend(BACKENDS[name].run, lambda *_: reason))


def test_every_row_is_of_a_backend_and_names_its_measurement():
    assert all(row.backend in BACKENDS and row.measurement for row in TABLE)
    assert all(set(names) <= set(BACKENDS) and names[-1] == "reference" for names in UNMEASURED.values())


def test_on_a_cpu_auto_takes_what_was_measured_there():
    choice = choose("auto", CPU, torch.float32, 64, 64)
    assert choice.name == "torch"
    assert choice.reason.startswith("auto chose torch: measured as fast as reference")


def test_what_cannot_run_is_passed_over_with_its_reason():
    choice = choose("auto", CPU, torch.float32, 30, 64)
    assert choice.name == "reference"
    assert choice.reason.startswith("auto chose reference: torch cannot run here: model.d_model=30 and")


def test_on_cuda_auto_takes_what_was_measured_there(all_run):
    choice = choose("auto", CUDA, torch.bfloat16, 768, 768)
    assert choice.name == "fused"
    assert choice.reason.startswith("auto chose fused: measured 1.6 times as fast as torch")


def test_on_cuda_the_default_is_the_fastest_of_other_widths(all_run):
    assert choose("auto", CUDA, torch.bfloat16, 768, 512).reason == (
        "auto chose fused: the default on cuda, where nothing is measured for torch.bfloat16 and these widths"
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_named_backend_runs_or_is_refused_but_never_replaced(all_run, monkeypatch, name):
    assert choose(name, CUDA, torch.bfloat16, 768, 768).name == name
    refuse(monkeypatch, name, "it is broken")
    with pytest.raises(UserError, match=f"^experts.backend={name} cannot run here: it is broken$"):
        choose(name, CUDA, torch.bfloat16, 768, 768)


@needs_megablocks
def test_the_record_says_what_computes():
    described = select.Choice("megablocks", "why").described
    assert described["megablocks_ops"] in ("torch", "compiled")
    assert set(described) == {"reason", "megablocks_ops", "megablocks", "stanford-stk", "triton"}
    assert select.Choice("torch", "why").described == {"reason": "why"}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("experts=auto", "auto chose torch: measured as fast"),
        ("experts=reference", "reference, as experts.backend says"),
    ],
)
def test_a_run_says_and_records_its_backend_and_why(small_spec, capsys, override, reason):
    spec = small_spec(override, "model.d_expert=8", "trainer.max_steps=1")
    train(spec)
    record = json.loads((spec.path / "record.json").read_text())
    assert record["backend_choice"]["reason"].startswith(reason)
    assert f"experts: {record['backend_choice']['reason']}" in (spec.path / "train.log").read_text()
    assert f"experts: {reason}" in capsys.readouterr().out


def test_a_checkpoint_of_any_backend_loads_in_any_other():
    shape = TransformerShape(16, 1, 8, 1, 8, 4, 2, 1e4, 1e-5, "softmax", False)
    models = {name: Transformer(shape, name) for name in BACKENDS}
    for seed, saved in enumerate(models.values()):
        initialise(saved, seed, 0.02, "normal")
        for other in models.values():
            other.load_state_dict(saved.state_dict())  # strict: the same names and shapes
            assert torch.equal(other.blocks[0].feed_forward.w13_E2FD, saved.blocks[0].feed_forward.w13_E2FD)
