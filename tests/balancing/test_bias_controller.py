"""Every controller of the bias is its published rule, and groups of experts are those of DeepSeek-V3."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.base import FinishedStep
from simbal.balancing.bias import BiasController, LossFree, shortage
from simbal.balancing.composition import Composition, build_strategy
from simbal.conformance import FACTS, batch_of, composed_module, train
from simbal.errors import UserError
from simbal.hf.routers import find_routers
from simbal.model.router import Candidates, Router, Routing
from tests.balancing.cases import registered
from tests.balancing.example import routing_of
from tests.hf.architectures import K, architecture

STRATEGIES = registered()
LOGITS_NE = torch.tensor([[2.0, 1.0, 0.0, -1.0], [1.5, -0.5, 0.5, -2.0], [0.2, 0.8, -1.0, 0.1], [1.0, 0.9, -0.4, -0.6]])
FIRST, SECOND = [4, 3, 1, 0], [3, 2, 2, 1]  # tokens of each expert; the first are those of LOGITS_NE at K = 2


def configured(name: str, **changes):
    """A strategy of conf/balancing for one layer of four experts."""
    return build_strategy(name, STRATEGIES[name] | changes, {"num_layers": 1, "num_experts": 4})


def finished(counts, factor=1.0) -> FinishedStep:
    return FinishedStep(torch.tensor([counts]), 1, [], 0.1, factor)


def biases(strategy, *steps) -> list[list[float]]:
    """The bias after each step, of the first layer."""
    return [(strategy.update(finished(counts)), strategy.bias_LE[0].tolist())[1] for counts in steps]


@pytest.mark.parametrize(
    ("name", "changes", "steps", "expected"),
    [
        ("lf_groups", {}, [FIRST], [[-1e-3, -1e-3, 1e-3, 1e-3]]),
        ("lf_torchtitan", {}, [[5, 1, 1, 1]], [[-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3]]),
        ("bias_controller", {}, [FIRST, SECOND], [[-0.01, -0.005, 0.005, 0.01], [-0.015, -0.005, 0.005, 0.015]]),
        ("bias_controller", {"momentum": 0.5}, [FIRST], [[-0.005, -0.0025, 0.0025, 0.005]]),
        (  # positional: the part of the error itself is taken back when the error falls
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
def test_two_steps_worked_out_by_hand(name, changes, steps, expected):
    for bias, by_hand in zip(biases(configured(name, **changes), *steps), expected, strict=True):
        assert bias == pytest.approx(by_hand, abs=1e-9)


def test_the_increment_of_longcat_is_the_linear_error_at_its_rate_by_the_number_of_experts():
    """b_i += mu (1/E - c_i / (N K)), where all experts are feed-forwards."""
    mu, strategy = 1e-3, configured("bias_controller", error="linear", update_rate=1e-3 / 4)
    by_hand = [mu * (1 / 4 - count / 8) for count in FIRST]
    assert biases(strategy, FIRST)[0] == pytest.approx(by_hand, abs=1e-9)


COUNTS = st.lists(st.integers(0, 10**6), min_size=6, max_size=6)


@given(st.lists(COUNTS, min_size=1, max_size=5), st.booleans(), st.floats(0, 10), st.floats(0, 1))
def test_the_sign_is_loss_free_to_the_bit(steps, center, rate, factor):
    controller = BiasController(1, 6, rate, error="sign", center=center, kappa=2.0)
    loss_free = LossFree(1, 6, rate, center=center)
    for counts in steps:
        for strategy in (controller, loss_free):
            strategy.update(finished(counts, factor))
        assert torch.equal(controller.bias_LE, loss_free.bias_LE)


@given(
    st.lists(COUNTS.filter(any), min_size=1, max_size=8),
    st.sampled_from(["sign", "linear", "clip", "tanh"]),
    st.floats(0.1, 4),
    st.booleans(),
    st.floats(0, 0.95),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_the_bias_is_that_of_a_pi_controller_of_the_smoothed_error(
    steps, error, kappa, center, momentum, rate, proportional
):
    """The sum over all steps, in float64, of what the strategy adds up one by one."""
    strategy = BiasController(
        1, 6, rate, error=error, kappa=kappa, center=center, momentum=momentum, proportional=proportional
    )
    smoothed, total = torch.zeros(6).double(), torch.zeros(6).double()
    for counts in steps:
        strategy.update(finished(counts))
        load = torch.tensor(counts).double()
        v = kappa * (load.mean() - load) / load.mean()
        e = {"sign": v.sign(), "linear": v, "clip": v.clamp(-1, 1), "tanh": v.tanh()}[error]
        smoothed = momentum * smoothed + (1 - momentum) * (e - e.mean() if center else e)
        total += smoothed
    expected = proportional * smoothed + rate * total
    torch.testing.assert_close(strategy.bias_LE[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("error", "longest"), [("sign", 1.0), ("clip", 1.0), ("tanh", 1.0), ("linear", 7.0)])
def test_all_errors_but_the_linear_one_are_bounded_at_collapse(error, longest):
    """All tokens on one of 8 experts: v = 1 - E = -7."""
    strategy = BiasController(1, 8, 1.0, error=error)
    strategy.update(finished([64, *[0] * 7]))
    assert strategy.bias_LE.abs().max().item() == pytest.approx(longest, abs=1e-5)


@pytest.mark.parametrize("error", ["sign", "linear", "clip", "tanh"])
def test_an_even_load_and_no_load_at_all_move_nothing(error):
    for num_experts in range(1, 70):
        strategy = BiasController(1, num_experts, 1.0, error=error, proportional=1.0)
        for load in (7, 0):
            strategy.update(finished([load] * num_experts))
            assert not strategy.bias_LE.any()


def test_each_layer_has_an_error_of_its_own():
    v_LE = shortage(torch.tensor([FIRST, [0, 0, 0, 20]]))
    assert v_LE.tolist() == [[-1, -0.5, 0.5, 1], [1, 1, 1, -3]]
    strategy = BiasController(2, 4, 1.0, error="sign", center=True)
    strategy.update(FinishedStep(torch.tensor([FIRST, [0, 0, 0, 20]]), 1, [], 0.1, 1.0))
    assert strategy.bias_LE.tolist() == [[-1, -1, 1, 1], [0.5, 0.5, 0.5, -1.5]]


def test_the_schedule_scales_all_of_a_step():
    whole, half = (configured("bias_controller", proportional=0.5) for _ in range(2))
    whole.update(finished(FIRST))
    half.update(finished(FIRST, factor=0.5))
    torch.testing.assert_close(half.bias_LE, whole.bias_LE / 2)
    before_LE = half.bias_LE.clone()
    half.update(finished(SECOND, factor=0.0))
    assert torch.equal(half.bias_LE, before_LE)


@pytest.mark.parametrize("bias_on", ["logits", "scores"])
def test_the_bias_of_the_layer_is_added_to_what_it_is_said_to_be_on(bias_on):
    strategy = BiasController(2, 4, bias_on=bias_on)
    strategy.bias_LE += torch.tensor([[0.0, 1, 2, 3], [5, 7, 11, 13]])
    on_NE = {"logits": LOGITS_NE, "scores": LOGITS_NE.sigmoid()}[bias_on]
    scores_NE = strategy.choice_scores(Candidates(1, torch.zeros(1, 4), LOGITS_NE, LOGITS_NE.sigmoid(), 2))
    torch.testing.assert_close(scores_NE, on_NE + torch.tensor([5.0, 7, 11, 13]))


def max_vio_after(strategy, steps: int) -> float:
    """Mean over the last 50 of these steps, of fixed logits that favour low indices."""
    logits_NE = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(2, -2, 8)
    seen = []
    for _ in range(steps):
        scores_NE = strategy.choice_scores(Candidates(0, torch.zeros(1, 512), logits_NE, logits_NE.sigmoid(), 2))
        counts_E = torch.bincount(scores_NE.topk(2).indices.flatten(), minlength=8)
        seen.append((counts_E.max() / counts_E.double().mean() - 1).item())
        strategy.update(finished(counts_E.tolist()))
    return sum(seen[-50:]) / 50


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9}, {"proportional": 0.1}, {"error": "tanh", "kappa": 2.0}])
def test_a_bounded_error_settles_where_the_sign_goes_on_swinging(changes):
    keys = {"update_rate": 0.1} | changes
    start, end = (max_vio_after(BiasController(1, 8, **keys), steps) for steps in (50, 300))
    swinging = max_vio_after(BiasController(1, 8, error="sign", update_rate=0.1), 300)
    assert start > 2 * end
    assert end < 0.05 < swinging


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"error": "cube"}, "error=cube is not one of sign, linear, clip, tanh"),
        ({"bias_on": "probs"}, "bias_on=probs is not one of logits, scores"),
        ({"update_rate": -1.0}, "update_rate=-1.0 must be a finite number of at least 0"),
        ({"proportional": float("inf")}, "proportional=inf must be a finite number of at least 0"),
        ({"kappa": 0.0}, "kappa=0.0 must be above 0: the bias would never move"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum=-0.1 must be at least 0 and below 1"),
        ({"groups": 0}, "groups=0 must be a whole number of at least 1"),
        ({"group_top_k": 0}, "group_top_k=0 must be a whole number of at least 1"),
        ({"groups": 2, "group_top_k": 3}, "group_top_k=3 must be at most groups=2"),
    ],
)
def test_nonsense_is_refused(changes, sentence):
    with pytest.raises(UserError) as refused:
        BiasController(1, 4, **changes)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ((3, 2), "groups=3 must divide model.num_experts=8"),
        ((4, 1), "group_top_k=1 leaves a token 2 experts, fewer than model.top_k=3"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(groups, sentence):
    strategy = BiasController(groups=groups[0], group_top_k=groups[1])
    with pytest.raises(UserError) as refused:
        strategy.prepare([Router(4, 8, 3, "sigmoid", True, layer=0)])
    assert str(refused.value) == sentence


def test_it_takes_its_size_from_the_routers_and_its_state_is_the_bias_and_the_error():
    strategy = BiasController()
    strategy.prepare([Router(4, 8, 3, "sigmoid", True, layer) for layer in range(3)])
    assert {name: tuple(buffer.shape) for name, buffer in strategy.state_dict().items()} == {
        "bias_LE": (3, 8), "error_LE": (3, 8),
    }  # fmt: skip
    assert strategy.bias_LE.dtype == strategy.error_LE.dtype == torch.float32
    with pytest.raises(UserError, match="made for num_layers=3 and num_experts=8, but the model has num_layers=1"):
        strategy.prepare([Router(4, 8, 3, "sigmoid", True, layer=0)])


def v3_routing(logits_NE, top_k, strategy) -> Routing:
    """How a sigmoid router decides that `strategy` steers."""

    def choice_scores(logits_NE, probs_NE):
        return strategy.choice_scores(Candidates(0, torch.zeros(1, len(logits_NE)), logits_NE, probs_NE, 2))

    return Routing.of_logits(logits_NE, top_k, torch.zeros(1), 1, "sigmoid", choice_scores=choice_scores)


def test_the_choice_within_groups_and_its_weights_on_the_example():
    strategy = configured("lf_groups")
    routing = v3_routing(LOGITS_NE, 2, strategy)
    assert routing.topk_experts_NK.sort(1).values.tolist() == [[0, 1]] * 4  # token 1 alone would choose 0 and 2
    assert routing.topk_probs_NK[0].tolist() == pytest.approx([1.3661 / 2.5, 1.1339 / 2.5], abs=1e-4)
    strategy.bias_LE += torch.tensor([-0.2, -0.2, 0.0, 0.0])
    # 1.1951 - 0.4 is still above 0.7417, and 1.2398 - 0.4 above 0.7939
    assert v3_routing(LOGITS_NE, 2, strategy).topk_experts_NK.sort(1).values.tolist() == [[0, 1]] * 4
    strategy.bias_LE -= torch.tensor([0.03, 0.03, 0.0, 0.0])
    # now not: 0.7351 and 0.7798
    chosen_NK = v3_routing(LOGITS_NE, 2, strategy).topk_experts_NK.sort(1).values
    assert chosen_NK.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]


def test_the_choice_within_groups_is_that_of_transformers_deepseek_v3():
    """With biases other than 0, by the model's own code; its weights are 2.5 times ours."""
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
    ours = v3_routing(logits_NE, K, strategy)
    theirs_NE = torch.zeros_like(logits_NE).scatter(1, experts_NK, weights_NK)
    ours_NE = torch.zeros_like(logits_NE).scatter(1, ours.topk_experts_NK, 2.5 * ours.topk_probs_NK)
    torch.testing.assert_close(ours_NE, theirs_NE, rtol=1e-4, atol=1e-5)


def test_the_sequence_loss_of_deepseek_v3_on_the_example():
    """By hand: f = (2, 1.5, 0.5, 0), P = (0.348775, 0.291191, 0.211563, 0.148471)."""
    routing = routing_of(LOGITS_NE.double(), 1, gating="sigmoid")
    assert configured("lbl_sequence").loss(routing).item() == pytest.approx(1.240119e-4, abs=1e-10)


def test_the_sequence_loss_counts_the_unbiased_choice_of_each_sequence_alone():
    """Sequences of two tokens, written out with plain sums; the choice that was carried out is another."""
    logits_NE = LOGITS_NE.double()
    routing = routing_of(logits_NE, 2, gating="sigmoid", experts_NK=torch.tensor([[2, 3]] * 4))
    values = []
    for tokens in (logits_NE[:2], logits_NE[2:]):
        s = tokens.sigmoid()
        f = [4 / (2 * 2) * sum(i in row.topk(2).indices.tolist() for row in s) for i in range(4)]
        p = (s / s.sum(1, keepdim=True)).mean(0).tolist()
        values.append(1e-4 * sum(a * b for a, b in zip(f, p, strict=True)))
    assert configured("lbl_sequence").loss(routing).item() == pytest.approx(sum(values) / 2, rel=1e-9)


def test_deepseek_v3_is_both_its_parts_and_stays_within_groups():
    parts = {name: build_strategy(name, STRATEGIES[name], FACTS) for name in ("lf_groups", "lbl_sequence")}
    module = composed_module(Composition(parts, {}), "sigmoid")
    train(module, range(3))
    assert parts["lf_groups"].bias_LE.abs().max() > 0
    _, routings = module.model(batch_of(3)[:, :-1], module.balancing)
    assert [*module.balancing.losses(routings)] == ["lbl_sequence"]
    for routing in routings:
        groups_NK = routing.topk_experts_NK // 3  # six experts in two groups
        assert (groups_NK == groups_NK[:, :1]).all()
        assert (routing.unsteered_experts_NK // 3 != groups_NK).any()
