"""The strategies in a program of someone else's: imported by name, no config, no trainer."""

import inspect
import subprocess
import sys

import pytest
import torch
from hydra.utils import get_class

import simbal.balancing as library
from simbal.balancing import (
    Balancing,
    ErnieOrthogonalLoss,
    LoadBalancingLoss,
    LossFree,
    OffDiagonalCosine,
    QuantileBalancing,
    RouterZLoss,
    Routing,
    RowNorm,
    SimBal,
)
from simbal.errors import UserError
from simbal.model.router import Router
from tests.balancing.cases import registered

E, D, N, K = 6, 16, 12, 2


def weight(rows: int = E, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a new interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_schedules_which_a_sweep_reads_load_without_torch():
    loaded = loaded_by("from simbal.config.schedule import Schedule")
    assert "simbal" in loaded
    assert "torch" not in loaded


@pytest.mark.slow
def test_strategies_and_what_attaches_them_load_with_torch_alone():
    loaded = loaded_by("from simbal.balancing import *; import simbal.hf")
    assert "torch" in loaded
    assert not {"hydra", "lightning", "omegaconf", "transformers"} & loaded


def test_every_strategy_that_the_library_exports_is_one_of_the_config():
    exported = {name for name in library.__all__ if issubclass(getattr(library, name), Balancing)}
    configured = {get_class(keys["_target_"]).__name__ for keys in registered().values()}
    assert exported - configured == {"Balancing", "WeightLoss"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(ImportError, match="SimBall"):
        from simbal.balancing import SimBall  # noqa: F401


# of classes whose defaults are those of lbl, lf and bias_controller
VARIANTS = {"lbl_listing", "lbl_olmoe", "lbl_sequence", "lf_torchtitan", "lf_groups", "smebu"}


@pytest.mark.parametrize("name", sorted(registered().keys() - VARIANTS))
def test_defaults_of_the_constructors_are_those_of_the_config(name):
    keys = registered()[name]
    parameters = inspect.signature(get_class(keys["_target_"])).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    facts = {"num_layers": 0, "num_experts": 0, "seed": 0}
    config = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
    assert defaults == config | {key: value for key, value in facts.items() if key in defaults}


@pytest.mark.parametrize("make", [SimBal, ErnieOrthogonalLoss, OffDiagonalCosine, RowNorm])
def test_the_loss_of_a_weight_is_that_of_a_routing_with_this_weight(make):
    weight_ED = weight()
    loss = make(coef=0.5).of_weight(weight_ED)
    routing = Routing.of_logits(torch.zeros(N, E), K, weight_ED)
    torch.testing.assert_close(loss, make(coef=0.5).loss(routing))
    assert torch.autograd.grad(loss, weight_ED)[0].abs().sum() > 0


def test_simbal_of_a_weight_is_its_formula():
    weight_ED = weight()
    expected = 0.1 * (weight_ED @ weight_ED.T - torch.eye(E)).abs().sum()
    torch.testing.assert_close(SimBal(coef=0.1).of_weight(weight_ED), expected)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_routing_of_logits_is_that_of_our_router(gating, renormalize):
    router = Router(D, E, K, gating, renormalize, layer=0)
    router.weight_ED.data.copy_(weight())
    x_ND = weight(N, seed=1)
    ours = router(x_ND, torch.zeros(3, N // 3, dtype=torch.int64))
    theirs = Routing.of_logits(x_ND @ router.weight_ED.T, K, router.weight_ED, 3, gating, renormalize)
    assert (theirs.gating, theirs.num_sequences, theirs.steered) == (ours.gating, ours.num_sequences, ours.steered)
    tensors = [key for key, value in vars(ours).items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    for key in tensors:
        torch.testing.assert_close(getattr(theirs, key), getattr(ours, key))
    for make in (LoadBalancingLoss, RouterZLoss):
        torch.testing.assert_close(make().loss(theirs), make().loss(ours))


def test_logits_of_lower_precision_are_gated_in_fp32():
    routing = Routing.of_logits(weight(N).detach()[:, :E].bfloat16(), K, weight())
    assert routing.probs_NE.dtype == routing.topk_probs_NK.dtype == torch.float32


def routers(num_layers: int, num_experts: int = E) -> list[Router]:
    return [Router(D, num_experts, K, "softmax", True, layer) for layer in range(num_layers)]


@pytest.mark.parametrize("make", [LossFree, QuantileBalancing])
def test_a_bias_takes_its_size_from_the_routers(make):
    strategy: Balancing = make()
    strategy.prepare(routers(3))
    assert strategy.bias_LE.shape == (3, E)
    assert [*strategy.state_dict()] == ["bias_LE"]


@pytest.mark.parametrize("make", [LossFree, QuantileBalancing])
def test_a_bias_made_for_another_model_is_refused(make):
    with pytest.raises(UserError, match="made for num_layers=2 and num_experts=8, but the model has num_layers=3 and"):
        make(2, 8).prepare(routers(3))


def test_preparing_keeps_a_bias_that_fits():
    strategy = LossFree(2, E, bias_dtype="bf16")
    strategy.bias_LE.add_(1)
    strategy.prepare(routers(2))
    assert (strategy.bias_LE == 1).all()
    assert strategy.bias_LE.dtype == torch.bfloat16
