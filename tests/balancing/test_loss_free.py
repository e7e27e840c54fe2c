"""The loss-free bias moves as published, in whole steps, and only after the step that it looks at."""

import pytest
import torch

from simbal.balancing.base import FinishedStep
from simbal.balancing.bias import LossFree
from simbal.conformance import batch_of, module_of, train
from simbal.errors import UserError
from simbal.model.router import Candidates
from tests.balancing.example import routing_of


def loss_free(E=4, L=1, update_rate=1e-3, bias_on="logits", center=False, bias_dtype="fp32") -> LossFree:
    return LossFree(L, E, update_rate, bias_on, center, bias_dtype)


def finished(counts_LE, factor=1.0) -> FinishedStep:
    return FinishedStep(torch.tensor(counts_LE), 1, [], 0.1, factor)


@pytest.mark.parametrize(
    ("center", "updates"),
    [
        (False, [[-1, 0, 1, 1], [1, 1, 1, -1]]),
        (True, [[-1.25, -0.25, 0.75, 0.75], [0.5, 0.5, 0.5, -1.5]]),
    ],
)
def test_an_update_is_the_sign_of_what_each_layer_misses_to_an_even_load(center, updates):
    strategy = loss_free(L=2, center=center)
    strategy.update(finished([[10, 6, 4, 4], [1, 1, 1, 21]]))
    torch.testing.assert_close(strategy.bias_LE, 1e-3 * torch.tensor(updates))


@pytest.mark.parametrize("bias_on", ["logits", "scores"])
def test_the_bias_of_the_layer_is_added_to_what_it_is_said_to_be_on(bias_on):
    strategy = loss_free(L=2, bias_on=bias_on)
    strategy.bias_LE += torch.tensor([[0.0, 1, 2, 3], [5, 7, 11, 13]])
    logits_NE = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    on_NE = {"logits": logits_NE, "scores": logits_NE.sigmoid()}[bias_on]
    scores_NE = strategy.choice_scores(Candidates(1, torch.zeros(1, 1), logits_NE, logits_NE.sigmoid(), 2))
    torch.testing.assert_close(scores_NE, on_NE + torch.tensor([5.0, 7, 11, 13]))


def test_an_even_load_moves_nothing_for_any_number_of_experts():
    for num_experts in range(1, 70):
        strategy = loss_free(num_experts)
        strategy.update(finished([[7] * num_experts]))
        assert not strategy.bias_LE.any()


def test_the_schedule_scales_the_update():
    strategy = loss_free()
    strategy.update(finished([[10, 6, 4, 4]], factor=0.5))
    assert strategy.bias_LE.tolist()[0] == pytest.approx([-5e-4, 0, 5e-4, 5e-4])


@pytest.mark.parametrize(("dtype", "end"), [("fp32", 2.0), ("bf16", 0.5)])
def test_two_thousand_updates_add_up_in_fp32_and_stall_in_bf16(dtype, end):
    strategy = loss_free(2, bias_dtype=dtype)
    strategy.to(torch.bfloat16)
    for _ in range(2000):
        strategy.update(finished([[1, 0]]))
    assert strategy.bias_LE[0].tolist() == pytest.approx([-end, end], abs=1e-4)
    assert strategy.bias_LE.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


@pytest.mark.parametrize("bias_on", ["logits", "scores"])
def test_the_bias_picks_but_never_weighs_and_a_constant_changes_nothing(bias_on):
    modules = [module_of(loss_free(6, 2, bias_on=bias_on)) for _ in range(3)]
    strategies = [module.balancing.parts["it"] for module in modules]
    strategies[1].bias_LE += torch.tensor([0, 0, 9.0, 9.0, 0, 0])
    strategies[2].bias_LE += 0.25
    tokens_BS = batch_of(0)[:, :-1]
    plain, steered, shifted = (module.model(tokens_BS, module.balancing)[1][0] for module in modules)
    assert set(steered.topk_experts_NK.flatten().tolist()) == {2, 3}
    chosen_NK = steered.logits_NE.gather(1, steered.topk_experts_NK)
    torch.testing.assert_close(steered.topk_probs_NK, chosen_NK.softmax(1))
    assert torch.equal(plain.topk_experts_NK, shifted.topk_experts_NK)


def test_the_batch_of_a_step_moves_the_choice_of_the_next_one_only():
    """Both modules see the same batch after another one; only the counts of the first step differ."""
    first, second = (module_of(loss_free(6, 2, update_rate=5.0)) for _ in range(2))
    counts = []
    for module, batches in ((first, (0, 1)), (second, (2, 1))):
        for parameter in module.model.parameters():
            parameter.requires_grad_(False)  # nothing but the bias may move
        module.model.head_VD.requires_grad_(True)
        before = module.balancing.parts["it"].bias_LE.clone()
        train(module, range(batches[0], batches[0] + 1))
        assert not torch.equal(before, module.balancing.parts["it"].bias_LE)
        module.training_step(batch_of(batches[1]), 0)
        counts.append(module.balancing_step.counts_LE)
    assert not torch.equal(*counts)


def test_scores_that_are_all_zero_are_refused_because_the_bias_alone_would_choose():
    silent = routing_of(torch.full((2, 4), -200.0), 1, gating="sigmoid")
    with pytest.raises(UserError, match="all scores of a token are zero"):
        loss_free(bias_on="scores").measure([silent])
    assert loss_free(bias_on="logits").measure([silent]).sum() == 4  # logits still tell the experts apart


@pytest.mark.parametrize(("key", "value"), [("bias_on", "probs"), ("bias_dtype", "fp8"), ("update_rate", -1)])
def test_nonsense_is_refused(key, value):
    with pytest.raises(UserError, match=f"{key}={value}"):
        loss_free(**{key: value})
