"""Strategies as a library: imported by name and built without config or trainer."""

import inspect
import subprocess
import sys

import pytest
import torch
from hydra.utils import get_class

import simbal.balancing as library
from simbal.balancing import (
    Balancing,
    BiasController,
    ExpertRouterCoupling,
    ExpertThreshold,
    LoadBalancingLoss,
    LossFree,
    OrthogonalMixture,
    QuantileBalancing,
    ReMoE,
    Temperature,
)
from simbal.errors import UserError
from simbal.model.router import Router
from tests.balancing.cases import registered

E, D, K = 6, 16, 2
NAN, INF = float("nan"), float("inf")


@pytest.mark.slow
def test_strategies_and_attach_load_without_hydra_lightning_and_transformers():
    code = "import sys; from simbal.balancing import *; import simbal.hf; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert "torch" in loaded
    assert not {"hydra", "lightning", "omegaconf", "transformers"} & loaded


def test_every_exported_strategy_has_a_config():
    exported = {name for name in library.__all__ if issubclass(getattr(library, name), Balancing)}
    configured = {get_class(keys["_target_"]).__name__ for keys in registered().values()}
    assert exported - configured == {"Balancing", "WeightLoss"}


# options that differ from the class defaults, which lbl, lf and bias_controller use
OTHER_OPTIONS = {"lbl_listing", "lbl_olmoe", "lbl_sequence", "lf_torchtitan", "lf_groups", "smebu"}


@pytest.mark.parametrize("name", sorted(registered().keys() - OTHER_OPTIONS))
def test_defaults_of_the_constructor_equal_the_config(name):
    keys = registered()[name]
    parameters = inspect.signature(get_class(keys["_target_"])).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    facts = {"num_layers": 0, "num_experts": 0, "seed": 0} | dict.fromkeys(
        ("vocab_size", "end_of_text", "token_counts")
    )
    config = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
    assert defaults == config | {key: value for key, value in facts.items() if key in defaults}


def routers(num_layers: int = 3, num_experts: int = E, top_k: int = K) -> list[Router]:
    return [Router(D, num_experts, top_k, "softmax", True, layer) for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (LossFree, ["bias_LE"]),
        (BiasController, ["bias_LE", "error_LE"]),
        (QuantileBalancing, ["bias_LE"]),
        (ExpertThreshold, ["threshold_LE"]),
        (ExpertRouterCoupling, ["spread_LE"]),
    ],
)
def test_state_takes_its_size_from_the_routers_and_fits_no_other_model(make, names):
    strategy: Balancing = make()
    strategy.prepare(routers())
    sizes = {name: tuple(buffer.shape) for name, buffer in strategy.state_dict().items() if buffer.ndim}
    assert sizes == dict.fromkeys(names, (3, E))
    with pytest.raises(UserError, match="num_layers=2 and num_experts=8, but the model has num_layers=3"):
        make(2, 8).prepare(routers())


def test_preparing_keeps_a_bias_of_the_right_shape():
    strategy = LossFree(2, E, bias_dtype="bf16")
    strategy.bias_LE.add_(1)
    strategy.prepare(routers(2))
    assert (strategy.bias_LE == 1).all()
    assert strategy.bias_LE.dtype == torch.bfloat16


INVALID = {
    "SimBal": {"coef": [-0.1, NAN, INF, "much", True], "reduction": ["max"]},
    "RowNorm": {"coef": [NAN]},
    "LoadBalancingLoss": {key: ["odd"] for key in ("gates", "scope", "norm", "choice", "over_layers")},
    "LossFree": {"bias_on": ["probs"], "bias_dtype": ["fp8"], "update_rate": [-1]},
    "BiasController": {
        "error": ["cube"], "proportional": [INF], "kappa": [0.0], "momentum": [1.0, -0.1], "groups": [0],
        "group_top_k": [0, 2],
    },
    "QuantileBalancing": {"smoothing": [-0.1, 1.0]},
    "ExpertThreshold": {"decay": [-0.1, 1.0]},
    "PrototypeRouter": {"decay": [-0.1, 1.0], "scale": [0]},
    "CosineRouter": {"scale": [0, -1.0]},
    "LogitNorm": {"scale": [0]},
    "Temperature": {"temperature": [0, -1.0, INF, NAN], "of_layers": [[1.0, 0.0]]},
    "Sinkhorn": {"iterations": [0, -1, 2.5]},
    "TopP": {"p": [-0.1, 1.0, NAN]},
    "ReMoE": {"alpha": [1]},
    "Capacity": {"capacity_factor": [0, -1.0, INF, NAN]},
    "ExpertChoice": {"capacity_factor": [0]},
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_argument_is_refused_by_name(name):
    for key, values in INVALID[name].items():
        for value in values:
            with pytest.raises(UserError, match=f"^{key}="):
                getattr(library, name)(**{key: value})


def test_lbl_refuses_to_combine_gates_and_counts_of_different_choices():
    with pytest.raises(UserError, match="choice=unbiased must be biased with gates=layer"):
        LoadBalancingLoss(gates="layer")


@pytest.mark.parametrize("make", [LoadBalancingLoss, QuantileBalancing, ExpertThreshold, ReMoE])
def test_strategies_need_an_expert_that_is_not_chosen(make):
    with pytest.raises(UserError, match=r"model.top_k equals model.num_experts"):
        make().prepare(routers(1, 2, 2))


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (BiasController(groups=4, group_top_k=2), "groups=4 must divide model.num_experts=6"),
        (BiasController(groups=6, group_top_k=1), "group_top_k=1 leaves a token 1 experts"),
        (Temperature(of_layers=[1.0]), "1 temperatures for 3 layers"),
    ],
)
def test_strategies_refuse_routers_that_do_not_fit(strategy, names):
    with pytest.raises(UserError, match=names):
        strategy.prepare(routers())


def test_orthogonal_rows_need_as_many_dimensions():
    with pytest.raises(UserError, match=r"num_experts=17 .*d_model=16"):
        OrthogonalMixture().prepare(routers(1, 17))
