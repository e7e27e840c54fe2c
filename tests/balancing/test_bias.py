"""The bias of loss-free balancing and of its controllers follows the published rules, also within groups of experts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.bias import BiasController, LossFree, load_deficit
from simbal.balancing.composition import build_strategy
from simbal.hf.routers import find_routers
from simbal.model.router import Candidates, Routing
from tests.balancing.cases import registered
from tests.balancing.example import LOGITS_NE, candidates, finished, routing_of
from tests.hf.architectures import K, architecture

STRATEGIES = registered()
FIRST, SECOND = [4, 3, 1, 0], [3, 2, 2, 1]  # tokens per expert; FIRST counts the choices of LOGITS_NE with K = 2
ERRORS = ["sign", "linear", "clip", "tanh"]
COUNTS = st.lists(st.integers(0, 10**6), min_size=6, max_size=6)


def configured(name: str, **changes):
    """A strategy of conf/balancing for one layer of four experts."""
    return build_strategy(name, STRATEGIES[name] | changes, {"num_layers": 1, "num_experts": 4})


@pytest.mark.parametrize(
    ("name", "changes", "steps", "expected"),
    [
        ("lf", {}, [[10, 6, 4, 4]], [[-1e-3, 0, 1e-3, 1e-3]]),
        ("lf_torchtitan", {}, [[5, 1, 1, 1]], [[-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3]]),
        ("bias_controller", {}, [FIRST, SECOND], [[-0.01, -0.005, 0.005, 0.01], [-0.015, -0.005, 0.005, 0.015]]),
        ("bias_controller", {"momentum": 0.5}, [FIRST], [[-0.005, -0.0025, 0.0025, 0.005]]),
        (  # the proportional part shrinks with the error
            "bias_controller",
            {"update_rate": 1e-3, "proportional": 0.01},
            [FIRST, SECOND],
            [[-0.011, -0.0055, 0.0055, 0.011], [-0.0065, -0.0005, 0.0005, 0.0065]],
        ),
        (
            "smebu",
            {},
            [FIRST, SECOND],
            [
                [-2.410069e-4, -1.903985e-4, 1.903985e-4, 2.410069e-4],
                [-5.519089e-4, -2.855978e-4, 2.855978e-4, 5.519089e-4],
            ],
        ),
    ],
)
def test_steps_worked_out_by_hand(name, changes, steps, expected):
    strategy = configured(name, **changes)
    for counts, by_hand in zip(steps, expected, strict=True):
        strategy.update(finished([counts]))
        assert strategy.bias_LE[0].tolist() == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("make", [LossFree, lambda *sizes, center: BiasController(*sizes, error="sign", center=center)])
def test_each_layer_is_balanced_separately(make, center):
    strategy = make(2, 4, 1.0, center=center)
    strategy.update(finished([[10, 6, 4, 4], [1, 1, 1, 21]]))
    centered = [[-1.25, -0.25, 0.75, 0.75], [0.5, 0.5, 0.5, -1.5]]
    assert strategy.bias_LE.tolist() == (centered if center else [[-1, 0, 1, 1], [1, 1, 1, -1]])
    assert load_deficit(torch.tensor([FIRST, [0, 0, 0, 20]])).tolist() == [[-1, -0.5, 0.5, 1], [1, 1, 1, -3]]


@given(
    st.lists(COUNTS.filter(any), min_size=1, max_size=8), st.sampled_from(ERRORS), st.floats(0.1, 4), st.booleans(),
    st.floats(0, 0.95), st.floats(0, 1), st.floats(0, 1),
)  # fmt: skip
def test_the_bias_is_a_pi_controller_of_the_smoothed_error(steps, error, kappa, center, momentum, rate, proportional):
    strategy = BiasController(
        1, 6, rate, error=error, kappa=kappa, center=center, momentum=momentum, proportional=proportional
    )
    smoothed, total = torch.zeros(6).double(), torch.zeros(6).double()
    for counts in steps:
        strategy.update(finished([counts]))
        load = torch.tensor(counts).double()
        v = kappa * (load.mean() - load) / load.mean()
        e = {"sign": v.sign(), "linear": v, "clip": v.clamp(-1, 1), "tanh": v.tanh()}[error]
        smoothed = momentum * smoothed + (1 - momentum) * (e - e.mean() if center else e)
        total += smoothed
    expected = proportional * smoothed + rate * total
    torch.testing.assert_close(strategy.bias_LE[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [None, *ERRORS])
def test_an_even_load_changes_nothing_for_any_number_of_experts(error):
    for num_experts in range(1, 70):
        strategy = LossFree(1, num_experts) if error is None else BiasController(1, num_experts, 1.0, error=error)
        for load in (7, 0):
            strategy.update(finished([[load] * num_experts]))
            assert not strategy.bias_LE.any()


@pytest.mark.parametrize(("name", "changes"), [("lf", {}), ("bias_controller", {"proportional": 0.5})])
def test_the_schedule_scales_the_update(name, changes):
    full, half = (configured(name, **changes) for _ in range(2))
    full.update(finished([FIRST]))
    half.update(finished([FIRST], factor=0.5))
    assert full.bias_LE.any()
    torch.testing.assert_close(half.bias_LE, full.bias_LE / 2)
    half.update(finished([SECOND], factor=0.0))
    torch.testing.assert_close(half.bias_LE, full.bias_LE / 2)


@pytest.mark.parametrize("bias_on", ["logits", "scores"])
@pytest.mark.parametrize("make", [LossFree, BiasController])
def test_the_layers_bias_is_added_to_logits_or_scores(make, bias_on):
    strategy = make(2, 4, bias_on=bias_on)
    strategy.bias_LE += torch.tensor([[0.0, 1, 2, 3], [5, 7, 11, 13]])
    on_NE = {"logits": LOGITS_NE, "scores": LOGITS_NE.sigmoid()}[bias_on]
    scores_NE = strategy.choice_scores(candidates(gating="sigmoid", layer=1))
    torch.testing.assert_close(scores_NE, on_NE + torch.tensor([5.0, 7, 11, 13]))


@pytest.mark.parametrize(("dtype", "end"), [("fp32", 2.0), ("bf16", 0.5)])
def test_two_thousand_updates_add_up_in_fp32_and_stall_in_bf16(dtype, end):
    strategy = LossFree(1, 2, bias_dtype=dtype)
    strategy.to(torch.bfloat16)
    for _ in range(2000):
        strategy.update(finished([[1, 0]]))
    assert strategy.bias_LE[0].tolist() == pytest.approx([-end, end], abs=1e-4)
    assert strategy.bias_LE.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


def test_the_choice_within_groups_equals_deepseek_v3_in_transformers():
    """With nonzero biases, by the model's own code; its weights are 2.5 times ours."""
    model = architecture("deepseek_v3")
    router = find_routers(model)[-1]
    torch.nn.init.normal_(router.bias, std=0.2)
    seen: list[torch.Tensor] = []
    handle = router.module.register_forward_hook(lambda module, args, output: seen.extend(output))
    with torch.no_grad():
        model(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1)))
    handle.remove()
    logits_NE, weights_NK, experts_NK = seen
    strategy = BiasController(1, logits_NE.shape[1], bias_on="scores", error="sign", groups=4, group_top_k=2)
    strategy.bias_LE = router.bias_E.detach()[None]
    ids_BS = torch.zeros(1, len(logits_NE))
    ours = Routing.of_logits(
        logits_NE, K, torch.zeros(1), 1, "sigmoid",
        choice_scores=lambda logits, probs: strategy.choice_scores(Candidates(0, ids_BS, logits, probs, K)),
    )  # fmt: skip
    theirs_NE = torch.zeros_like(logits_NE).scatter(1, experts_NK, weights_NK)
    ours_NE = torch.zeros_like(logits_NE).scatter(1, ours.topk_experts_NK, 2.5 * ours.topk_probs_NK)
    torch.testing.assert_close(ours_NE, theirs_NE, rtol=1e-4, atol=1e-5)


def test_the_sequence_loss_of_deepseek_v3_on_the_example():
    # f = (2, 1.5, 0.5, 0), P = (0.348775, 0.291191, 0.211563, 0.148471)
    routing = routing_of(LOGITS_NE.double(), 1, gating="sigmoid")
    assert configured("lbl_sequence").loss(routing).item() == pytest.approx(1.240119e-4, abs=1e-10)
