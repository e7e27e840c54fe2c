"""The analysis `margin`."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.coactivation import coactivation
from simbal.analysis.counterfactual import counterfactual
from simbal.analysis.margin import MarginRecorder, differ, margin, margins
from simbal.errors import UserError
from simbal.model.router import Router, Steering

KEYS = {"tokens": 160, "batch_size": 3, "quantiles": [0.01, 0.5]}


def test_margins_match_hand_calculation():
    logits_NE = torch.tensor([[2, 1, 0, -1], [1.5, -0.5, 0.5, -2], [0.2, 0.8, -1, 0.1], [1, 0.9, -0.4, -0.6]])
    margin_N, kth_N = margins(logits_NE, 2)
    assert margin_N.tolist() == pytest.approx([1.0, 1.0, 0.1, 1.3])
    assert kth_N.tolist() == pytest.approx([1.0, 0.5, 0.2, 0.9])


@pytest.mark.parametrize(("top_k", "flipped"), [(1, 1), (2, 0)])
def test_the_strategy_gets_rounded_logits_while_the_pass_keeps_its_own(top_k, flipped):
    class Biased(Steering):
        def adjust_logits(self, logits_NE):
            return 2 * logits_NE

        def choice_scores(self, candidates):
            return candidates.probs_NE + 0.5

    router = Router(4, 4, top_k, "sigmoid", renormalize=True, layer=0)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(4) / 2)
        recorder = MarginRecorder(Biased(), [router])
        routing = router(torch.tensor([[1.001, 1.003, 0.998, 0.5]]), torch.zeros(1, 1, dtype=torch.int64), recorder)
    assert routing.topk_experts_NK[0].tolist() == [1, 0][:top_k]
    assert (recorder.flips[0], recorder.near[0], recorder.by_logits) == (flipped, 1, False)
    p_2 = torch.tensor([1.003, 1.001]).sigmoid() if top_k == 1 else torch.tensor([1.001, 0.998]).sigmoid()
    assert recorder.margins[0][0].item() == pytest.approx((p_2[0] - p_2[1]).item(), abs=1e-6)


@given(top_k=st.integers(1, 5), seed=st.integers(0, 999), share=st.floats(0, 0.49))
def test_changes_below_half_the_margin_flip_nothing(top_k, seed, share):
    rng = torch.Generator().manual_seed(seed)
    scores_NE = torch.randn(30, 6, generator=rng, dtype=torch.float64)
    change_NE = 2 * torch.rand(30, 6, generator=rng, dtype=torch.float64) - 1
    margin_N, _ = margins(scores_NE, top_k)
    assert not differ(scores_NE, scores_NE + share * margin_N[:, None] * change_NE, top_k).any()
    swapped_NE = scores_NE.scatter(1, scores_NE.topk(top_k + 1).indices[:, -1:], 99)
    assert differ(scores_NE, swapped_NE, top_k).all()


def test_a_biased_choice_is_measured_by_its_biased_scores(trained):
    biased = trained(
        "balancing=lf", "router=sigmoid", "balancing.lf.update_rate=0.1", "balancing.lf.bias_on=scores",
        "trainer.max_steps=12",
    )  # fmt: skip
    record = margin(biased, **KEYS).record
    assert record["by_logits"] is False
    bias_LE = biased.module.balancing.parts["lf"].bias_LE
    assert bias_LE.any()
    routings = [batch.routings for batch in biased.predict(3, 160)]
    for layer, bias_E in enumerate(bias_LE):
        logits_NE = torch.cat([its[layer].logits_NE for its in routings])
        scores_NE = logits_NE.sigmoid() + bias_E
        _, second_N, third_N, _ = scores_NE.double().sort(1, descending=True).values.T
        margin_N, near_N = second_N - third_N, second_N - third_N < second_N.abs() / 256
        flipped_N = differ(scores_NE, logits_NE.bfloat16().float().sigmoid() + bias_E, 2)
        expected = dict(zip(("margin_q0.01", "margin_q0.5"), np.quantile(margin_N, KEYS["quantiles"]), strict=True))
        expected |= {"near": near_N.double().mean().item(), "flips": flipped_N.double().mean().item()}
        assert {name: values[layer] for name, values in record["layers"].items()} == pytest.approx(expected)
    assert record["tokens"] == len(margin_N)
    assert record["metrics"]["near"] == pytest.approx(sum(record["layers"]["near"]) / 2)


def test_a_choice_that_ignores_the_logits_has_margins_but_no_flips(trained):
    metrics = margin(trained("balancing=uniform"), **KEYS).record["metrics"]
    assert metrics["flips"] == 0 < metrics["margin_q0.5"]


def test_analyses_of_k_experts_reject_a_strategy_with_a_varying_number(trained):
    run = trained("balancing=expert_threshold")
    for analysis, keys in (
        (margin, KEYS),
        (coactivation, {"tokens": 160, "batch_size": 3}),
        (counterfactual, {"tokens": 160, "batch_size": 3, "draws": 1, "resamples": 2, "seed": 0}),
    ):
        with pytest.raises(UserError, match=f"^analysis={analysis.__name__} needs K experts for every token"):
            analysis(run, **keys)
