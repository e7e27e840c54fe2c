"""Strategies that take the router's weight from the optimizer: it never moves, or only within fixed directions."""

import pytest
import torch
from scipy.linalg import polar

from simbal.balancing.composition import Composition, build_balancing
from simbal.balancing.controls import FrozenRouter
from simbal.balancing.orthogonal import OrthogonalMixture
from simbal.conformance import FACTS, composed_module, tiny_model
from simbal.errors import UserError
from simbal.model.init import init_router, initialise
from simbal.model.router import Router
from simbal.model.transformer import Transformer
from simbal.training.build import transformer_shape
from simbal.training.optimizer import parameter_groups
from simbal.training.run import train
from tests.balancing.cases import registered
from tests.training.run_files import weights

KEYS = registered()
ROUTER = "model.blocks.{}.feed_forward.router."


def together(*names: str) -> Composition:
    return build_balancing({name: KEYS[name] for name in names}, FACTS, 100, "sum")


def drawn(spec, init: str) -> Transformer:
    """The model of a run as it started."""
    model = Transformer(transformer_shape(spec, 0))
    initialise(model, spec.config.seed, spec.config.model.init_std, init)
    return model


def router(num_experts: int, d_model: int, init: str) -> Router:
    made = Router(d_model, num_experts, 2, "softmax", renormalize=True, layer=0)
    init_router(made.weight_ED, init, 0.3, torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize(
    ("keys", "init"), [(("balancing=frozen", "router.init=normal"), "normal"), (("balancing=lf_frozen",), "orthogonal")]
)
def test_a_frozen_router_ends_as_it_was_drawn_and_all_else_moves(small_spec, keys, init):
    spec = small_spec(*keys, "optim.weight_decay=1")
    train(spec)
    start, end = drawn(spec, init), weights(spec)
    for name, parameter in start.named_parameters():
        assert torch.equal(parameter, end[f"model.{name}"]) == ("router" in name), name
    assert keys[0] == "balancing=frozen" or end["balancing.strategies.lf.bias_LE"].any()


def test_a_frozen_router_is_no_matter_of_the_optimizer():
    module = composed_module(together("frozen", "lf"))
    frozen = [router.weight_ED for router in module.model.routers]
    grouped = [p for group in parameter_groups(module.model, module.optim) for p in group["params"]]
    assert not {id(p) for p in frozen} & {id(p) for p in grouped}
    assert len(grouped) + len(frozen) == len(list(module.model.parameters()))


@pytest.mark.parametrize("loss", ["simbal", "row_norm", "ernie_ortho"])
def test_a_loss_on_frozen_weights_is_refused(loss):
    with pytest.raises(UserError, match=f"^balancing: {loss} is a loss on the router's weight, and here nothing"):
        together("frozen", loss).prepare(tiny_model().routers)
    with pytest.raises(UserError, match="frozen and ortho_mix both set the router's weight"):
        together("frozen", "ortho_mix")


def test_a_loss_of_tokens_still_reaches_the_hidden_states_of_a_frozen_router():
    module = composed_module(together("frozen", "lbl"))
    tokens_BS = torch.arange(16).view(2, 8)
    _, routings = module.model(tokens_BS, module.balancing)
    module.balancing.losses(routings)["lbl"].backward()
    assert module.model.embedding.weight.grad.any()
    assert all(router.weight_ED.grad is None for router in module.model.routers)


def test_a_mixture_starts_as_the_identity_on_orthonormal_rows_which_are_those_of_the_start():
    made = router(6, 16, "orthogonal")
    before_ED = made.weight_ED.detach().clone()
    OrthogonalMixture().prepare([made])
    torch.testing.assert_close(made.parametrizations.weight_ED.original, torch.eye(6), atol=1e-6, rtol=0)
    torch.testing.assert_close(made.weight_ED, before_ED)


def test_any_start_is_kept_and_the_basis_is_the_factor_of_its_polar_decomposition():
    made = router(6, 16, "normal")
    before_ED = made.weight_ED.detach().clone()
    OrthogonalMixture().prepare([made])
    unitary_ED, positive_EE = polar(before_ED.double().numpy(), side="left")
    computed = made.parametrizations.weight_ED
    torch.testing.assert_close(computed[0].basis_ED, torch.from_numpy(unitary_ED).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(computed.original, torch.from_numpy(positive_EE).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.weight_ED, before_ED)


def test_a_mixture_trains_away_from_orthonormal_rows_within_their_span(small_spec):
    spec = small_spec("balancing=ortho_mix", "optim.lr=0.01")
    train(spec)
    start, end = drawn(spec, "orthogonal"), weights(spec)
    for layer, begun in enumerate(start.routers):
        prefix = ROUTER.format(layer) + "parametrizations.weight_ED."
        basis_ED, mixture_EE = end[f"{prefix}0.basis_ED"], end[f"{prefix}original"]
        torch.testing.assert_close(basis_ED, begun.weight_ED.detach(), atol=1e-6, rtol=0)
        assert (mixture_EE - torch.eye(len(mixture_EE))).abs().max() > 0.01


@pytest.mark.parametrize("decay_router", [True, False])
def test_a_mixture_decays_as_a_router_does_and_householder_vectors_never(decay_router):
    for name, decays in (("ortho_mix", decay_router), ("ortho_param", False), ("none", decay_router)):
        module = composed_module(together(name))
        decayed, _ = parameter_groups(module.model, module.optim.model_copy(update={"decay_router": decay_router}))
        of_routers = {id(p) for router in module.model.routers for p in router.parameters()}
        assert bool(of_routers & {id(p) for p in decayed["params"]}) == decays, name


def test_more_rows_than_dimensions_are_refused():
    with pytest.raises(UserError, match="model.num_experts=6 rows cannot be orthogonal in model.d_model=5 dimensions"):
        OrthogonalMixture().prepare([router(6, 5, "normal")])


def test_a_frozen_router_may_have_more_rows_than_dimensions():
    made = router(6, 5, "normal")
    FrozenRouter().prepare([made])
    assert not made.weight_ED.requires_grad
