"""A strategy that chooses experts, or changes logits, does so inside the host model as in our own router."""

import copy

import pytest
import torch

from simbal.balancing import (
    ErnieOrthogonalLoss,
    HashRouting,
    LogitNorm,
    LossFree,
    QuantileBalancing,
    SimBal,
    Sinkhorn,
    UniformRouting,
)
from simbal.errors import UserError
from simbal.hf import attach
from simbal.model.router import Router
from tests.hf.models import HOSTS, B, E, K, L, S, batch, host, router_weights

STRATEGIES = [
    LossFree(update_rate=0.5), LossFree(update_rate=0.1, bias_on="scores", center=True), QuantileBalancing(),
    LogitNorm(2.0), Sinkhorn(), HashRouting(1), UniformRouting(1),
]  # fmt: skip


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("name", HOSTS)
def test_experts_and_weights_are_those_of_our_own_router(name, strategy, train):
    model, given = host(HOSTS[name]), []
    with attach(model, copy.deepcopy(strategy)) as balancing:
        model(**batch())
        balancing.step()
        model.train(train)
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(lambda module, args: given.append(args))
        model(**batch(1))
        assert len(given) == len(balancing.routers)
        reference = copy.deepcopy(balancing.strategies).train(train)
        for router, (x_ND, experts_NK, weights_NK) in zip(balancing.routers, given, strict=True):
            ours = Router(x_ND.shape[1], E, K, router.gating, router.renormalize, router.layer)
            ours.weight_ED = router.weight_ED
            expected = ours(x_ND, batch(1)["input_ids"], reference)
            assert torch.equal(experts_NK, expected.topk_experts_NK)
            torch.testing.assert_close(weights_NK, expected.topk_probs_NK)
            recorded = balancing.routings[router.layer]
            assert torch.equal(recorded.topk_experts_NK, expected.topk_experts_NK)
            assert recorded.steered == expected.steered


@pytest.mark.parametrize("name", HOSTS)
def test_a_bias_of_zero_leaves_the_model_as_it_is(name):
    model = host(HOSTS[name])
    plain = model(**batch()).logits
    with attach(model, LossFree()):
        torch.testing.assert_close(model(**batch()).logits, plain)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_free_bias_moves_by_its_definition_and_only_in_step(micro_batches):
    model, expected_LE = host(), torch.zeros(L, E)
    with attach(model, {"lf": LossFree(update_rate=0.25)}) as balancing:
        bias_LE = balancing.strategies.parts["lf"].bias_LE
        for step in range(3):
            counts_LE = torch.zeros(L, E)
            for part in range(micro_batches):
                model(**batch(10 * step + part))
                for layer, routing in enumerate(balancing.routings):
                    counts_LE[layer] += torch.bincount(routing.topk_experts_NK.flatten(), minlength=E)
                assert torch.equal(bias_LE, expected_LE)
            balancing.step()
            expected_LE += 0.25 * (micro_batches * B * S * K / E - counts_LE).sign()
            assert torch.equal(bias_LE, expected_LE)
        assert expected_LE.abs().sum() > 0


def test_a_loss_free_bias_evens_the_load():
    model = host()
    with attach(model, LossFree(update_rate=0.05)) as balancing:
        loads = []
        for _ in range(60):
            model(**batch())
            loads.append(max(float(routing.tokens_per_expert_E.max()) for routing in balancing.routings))
            balancing.step()
    assert loads[0] >= 1.4 * B * S * K / E
    assert min(loads[-10:]) <= 1.2 * B * S * K / E


def test_the_router_still_learns_from_the_language_model_under_a_bias():
    model = host()
    with attach(model, LossFree(update_rate=1.0)) as balancing:
        model(**batch())
        balancing.step()
        model(**batch()).loss.backward()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in router_weights(model).values())


@pytest.mark.parametrize(
    "strategies", [[LossFree(update_rate=0.5)], [QuantileBalancing(), SimBal()], [UniformRouting()]]
)
def test_a_run_goes_on_from_its_state_as_if_it_had_not_stopped(strategies, tmp_path):
    model = host()
    with attach(model, copy.deepcopy(strategies)) as balancing:
        for step in range(3):
            model(**batch(step))
            balancing.step()
        torch.save(balancing.state_dict(), tmp_path / "state.pt")
        expected = model(**batch(9)).logits
    with attach(model, copy.deepcopy(strategies)) as balancing:
        assert not torch.equal(model(**batch(9)).logits, expected)
        balancing.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert balancing.steps == 3
        assert torch.equal(model(**batch(9)).logits, expected)


@pytest.mark.parametrize("name", HOSTS)
def test_a_steered_model_computes_in_its_own_dtype(name):
    model, dtypes = host(HOSTS[name]).bfloat16(), []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda module, args: dtypes.append([tensor.dtype for tensor in args]))
    model(**batch())
    plain, dtypes = dtypes, []
    with attach(model, LossFree()):
        output = model(**batch(), output_router_logits=True)
    assert dtypes == plain
    assert output.router_logits[0].dtype == torch.bfloat16


def test_router_logits_that_transformers_returns_are_those_that_were_used():
    model = host()
    model(**batch(), output_router_logits=True)  # transformers installs its hooks for them here, before ours
    with attach(model, LogitNorm(3.0)) as balancing:
        output = model(**batch(), output_router_logits=True)
        for logits_NE, routing in zip(output.router_logits, balancing.routings, strict=True):
            assert torch.equal(logits_NE, routing.logits_NE)
            torch.testing.assert_close(logits_NE.std(-1, unbiased=False), torch.full((B * S,), 3.0))


def test_embeddings_instead_of_token_ids_serve_all_but_those_who_need_the_ids():
    model, inputs = host(), batch()
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "labels": inputs["labels"]}
    with attach(model, LossFree()):
        torch.testing.assert_close(model(**embedded).logits, model(**inputs).logits)
    for strategy in (HashRouting(), UniformRouting()):
        with (
            attach(model, strategy),
            pytest.raises(UserError, match=f"{type(strategy).__name__} chooses experts by tok"),
        ):
            model(**embedded)


@pytest.mark.parametrize("scale_by_lr", [True, False])
def test_a_decoupled_step_moves_the_routers_after_the_optimizer(scale_by_lr):
    model = host()
    before = [weight.detach().clone() for weight in router_weights(model).values()]
    penalty = ErnieOrthogonalLoss(coef=1.0)
    strategy = ErnieOrthogonalLoss(coef=1.0, decoupled=True, scale_by_lr=scale_by_lr)
    with attach(model, strategy) as balancing:
        model(**batch())
        assert balancing.loss() == 0
        if scale_by_lr:
            with pytest.raises(UserError, match="ErnieOrthogonalLoss needs the learning rate"):
                balancing.step()
        balancing.step(lr=0.5)
    for old_ED, new_ED in zip(before, router_weights(model).values(), strict=True):
        (gradient_ED,) = torch.autograd.grad(penalty.of_weight(old_ED.requires_grad_()), old_ED)
        torch.testing.assert_close(new_ED, old_ED - (0.5 if scale_by_lr else 1.0) * gradient_ED)
