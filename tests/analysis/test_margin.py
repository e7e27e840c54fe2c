"""Margins and flips worked out by hand, and those of trained runs found again from what their routers say."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.coactivation import coactivation
from simbal.analysis.counterfactual import counterfactual
from simbal.analysis.margin import Watching, flips, margin, margins
from simbal.errors import UserError
from simbal.model.router import Router, Steering
from tests.analysis.module_runs import trained_run

KEYS = {"tokens": 160, "batch_size": 3, "quantiles": [0.01, 0.5]}
LOGITS_NE = torch.tensor([[2, 1, 0, -1], [1.5, -0.5, 0.5, -2], [0.2, 0.8, -1, 0.1], [1, 0.9, -0.4, -0.6]])


@pytest.fixture(scope="module")
def biased(tmp_path_factory, cache_dir):
    return trained_run(
        tmp_path_factory,
        cache_dir,
        "balancing=lf",
        "router=sigmoid",
        "balancing.lf.update_rate=0.1",
        "balancing.lf.bias_on=scores",
    )


def test_the_stated_tokens_have_the_margins_worked_out_by_hand():
    margin_N, kth_N = margins(LOGITS_NE, 2)
    assert margin_N.tolist() == pytest.approx([1.0, 1.0, 0.1, 1.3])
    assert kth_N.tolist() == pytest.approx([1.0, 0.5, 0.2, 0.9])


def test_rounding_to_bf16_flips_the_best_expert_and_not_the_best_two():
    logits_NE = torch.tensor([[1.001, 1.003, 0.998, 0.5]])
    rounded_NE = logits_NE.bfloat16().float()
    assert rounded_NE[0].tolist() == pytest.approx([1, 1, 0.996094, 0.5], abs=1e-6)
    assert flips(logits_NE, rounded_NE, 1).tolist() == [True]
    assert flips(logits_NE, rounded_NE, 2).tolist() == [False]


@pytest.mark.parametrize(("top_k", "flipped"), [(1, 1), (2, 0)])
def test_a_strategy_sees_rounded_logits_and_probabilities_and_the_pass_its_own(top_k, flipped):
    class Biased(Steering):
        def adjust_logits(self, logits_NE):
            return 2 * logits_NE

        def choice_scores(self, candidates):
            return candidates.probs_NE + 0.5

    router = Router(4, 4, top_k, "sigmoid", renormalize=True, layer=0)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(4) / 2)
        seen, tokens_BS = Watching(Biased(), [router]), torch.zeros(1, 1, dtype=torch.int64)
        routing = router(torch.tensor([[1.001, 1.003, 0.998, 0.5]]), tokens_BS, seen)
    assert routing.topk_experts_NK[0].tolist() == [1, 0][:top_k]
    assert (seen.flips[0], seen.near[0], seen.by_logits) == (flipped, 1, False)
    p_2 = torch.tensor([1.003, 1.001]).sigmoid() if top_k == 1 else torch.tensor([1.001, 0.998]).sigmoid()
    assert seen.margins[0][0].item() == pytest.approx((p_2[0] - p_2[1]).item(), abs=1e-6)


@given(top_k=st.integers(1, 5), seed=st.integers(0, 999), share=st.floats(0, 0.49))
def test_scores_that_change_by_less_than_half_the_margin_flip_nothing(top_k, seed, share):
    draws = torch.Generator().manual_seed(seed)
    scores_NE = torch.randn(30, 6, generator=draws, dtype=torch.float64)
    change_NE = 2 * torch.rand(30, 6, generator=draws, dtype=torch.float64) - 1
    margin_N, _ = margins(scores_NE, top_k)
    assert not flips(scores_NE, scores_NE + share * margin_N[:, None] * change_NE, top_k).any()
    swapped_NE = scores_NE.scatter(1, scores_NE.topk(top_k + 1).indices[:, -1:], 99)
    assert flips(scores_NE, swapped_NE, top_k).all()


def test_those_of_a_biased_choice_are_of_the_biased_scores(biased):
    record = margin(biased, **KEYS).record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["by_logits"] is False
    bias_LE = biased.module.balancing.parts["lf"].bias_LE
    assert bias_LE.any()
    routings = [batch.routings for batch in biased.predict(3, 160)]
    for layer, bias_E in enumerate(bias_LE):
        logits_NE = torch.cat([its[layer].logits_NE for its in routings])
        scores_N4 = (logits_NE.sigmoid() + bias_E).double().sort(1).values
        margin_N = scores_N4[:, 2] - scores_N4[:, 1]
        values = np.quantile(margin_N.numpy(), KEYS["quantiles"])
        assert [record["layers"][f"margin_q{level:g}"][layer] for level in KEYS["quantiles"]] == pytest.approx(values)
        near = (margin_N < scores_N4[:, 2].abs() / 256).double().mean().item()
        assert record["layers"]["near"][layer] == pytest.approx(near)
        rounded_NE = logits_NE.bfloat16().float().sigmoid() + bias_E
        first, second = ((logits_NE.sigmoid() + bias_E).topk(2).indices, rounded_NE.topk(2).indices)
        flipped = (first.sort(1).values != second.sort(1).values).any(1).double().mean().item()
        assert record["layers"]["flips"][layer] == pytest.approx(flipped)
    assert record["tokens"] == len(margin_N)
    of_layers = [record["layers"]["near"], record["layers"]["flips"]]
    assert [record["metrics"][name] for name in ("near", "flips")] == pytest.approx(
        [sum(each) / 2 for each in of_layers]
    )


def test_a_choice_that_no_logit_decides_has_margins_and_no_flips(tmp_path_factory, cache_dir):
    run = trained_run(tmp_path_factory, cache_dir, "balancing=uniform", "trainer.max_steps=1")
    finding = margin(run, **KEYS)
    assert finding.record["metrics"]["flips"] == 0
    assert finding.record["metrics"]["margin_q0.5"] > 0.05
    assert "those of the model's strategy or rule, not its logits" in finding.notes[0]


def test_a_model_that_gives_tokens_any_number_of_experts_is_refused_by_analyses_of_k(tmp_path_factory, cache_dir):
    run = trained_run(tmp_path_factory, cache_dir, "balancing=expert_threshold", "trainer.max_steps=1")
    analyses = {
        "margin": lambda: margin(run, **KEYS),
        "coactivation": lambda: coactivation(run, 160, 3),
        "counterfactual": lambda: counterfactual(run, 160, 3, draws=1, resamples=2, seed=0),
    }
    for name, analyse in analyses.items():
        with pytest.raises(UserError, match=f"^analysis={name} is of K experts for every token, and the strategy of"):
            analyse()
