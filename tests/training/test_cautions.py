"""A run warns of what it is to be careful of, and of nothing else."""

import pytest
import torch

from simbal.data.loader import ValidationSplit
from simbal.data.store import prepare
from simbal.model.router import Router
from simbal.runs.folder import RunFolder
from simbal.training.build import build_module
from simbal.training.run import train
from tests.analysis.text_run import text_spec

ONE = "model.top_k=1"


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ((ONE, "balancing=none"), True), ((ONE, "balancing=lbl"), True), ((ONE, "router=sigmoid"), True),
        ((ONE, "balancing=capacity"), True), ((ONE, "balancing=capacity", "router.renormalize=false"), False),
        ((ONE, "balancing=none", "router.renormalize=false"), False), ((ONE, "balancing=top_p"), False),
        (("balancing=none",), False), ((ONE, "balancing=none", "model.num_experts=0"), None),
    ],
)  # fmt: skip
def test_the_warning_is_there_where_the_gradient_is_not(small_spec, keys, idle):
    spec = small_spec("trainer.max_steps=1", "optim.warmup_steps=0", *keys)
    train(spec)
    warnings = RunFolder(spec.path).read_record()["warnings"]
    assert any("only a balancing loss trains the router" in warning for warning in warnings) is bool(idle)
    module = build_module(spec, prepare(spec.config.data, progress=False), torch.device("cpu"), "32-true")
    hidden_BSD, _ = module.model(torch.arange(64).view(4, 16), module.balancing)
    (hidden_BSD * torch.randn_like(hidden_BSD)).sum().backward()
    weights = [w for part in module.model.modules() if isinstance(part, Router) for w in part.parameters()]
    gradients = [0.0 if weight.grad is None else weight.grad.abs().max().item() for weight in weights]
    if idle is None:
        assert gradients == []
    else:
        assert [gradient < 1e-5 for gradient in gradients] == [idle] * 2, gradients


def test_few_documents_are_warned_of_with_what_to_raise(tmp_path):
    few = text_spec(tmp_path)
    train(few)
    (warning,) = RunFolder(few.path).read_record()["warnings"]
    documents = len(ValidationSplit.of(prepare(few.config.data, progress=False), 16, 0, None).document_ends)
    assert warning.startswith(f"the validation split has {documents} documents, and fewer than 30")


def test_too_narrow_a_drawing_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("simbal.training.cautions.FEW_DOCUMENTS", 5)
    spec = text_spec(tmp_path, "trainer.pes_every=12", "trainer.pes_tokens=32")
    train(spec)
    drawn, pes = RunFolder(spec.path).read_record()["warnings"]
    assert drawn.startswith("data.validation_tokens=64 are of ")
    assert pes.startswith("trainer.pes_tokens=32 are of ")
    assert pes.endswith("raise it")


@pytest.mark.parametrize(
    ("keys", "divided"),
    [
        (("optim.grad_clip=1",), False), (("balancing.simbal.coef=10", "optim.grad_clip=1"), True),
        (("balancing.simbal.coef=10",), False),
    ],
)  # fmt: skip
def test_a_gradient_that_another_divides_is_warned_of(small_spec, keys, divided, capsys):
    """That of SimBal has the norm 2 coef E sqrt(L) = 113 at a coefficient of 10, and is clipped to 1."""
    spec = small_spec("balancing=simbal", *keys)
    train(spec)
    warnings = RunFolder(spec.path).read_record()["warnings"]
    beginnings = [warning.partition(",")[0] for warning in warnings]
    assert beginnings == ["optim.grad_clip=1 has divided gradients by 113"] * divided
    printed = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert printed == [f"warning: {warning}" for warning in warnings]
