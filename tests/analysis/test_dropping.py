"""The analysis `dropping`."""

import math

import pytest
import torch

from simbal.analysis.dropping import Dropping, dropping
from simbal.analysis.quality import quality
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Steering, topk_indices

PROBS_NE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]])


class Scaled(Steering):
    """A strategy that adds a bias to the choice and scales the logits."""

    def __init__(self, bias_E=0.0, factor=1.0):
        self.bias_E, self.factor = bias_E, factor

    def adjust_logits(self, logits_NE):
        return self.factor * logits_NE

    def choice_scores(self, candidates):
        return candidates.logits_NE + self.bias_E


def route(steering):
    router = Router(4, 4, 2, "softmax", renormalize=True, layer=0)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(4))
        return router(PROBS_NE.log(), torch.zeros(2, 2, dtype=torch.int64), steering)


def test_the_next_experts_replace_the_dropped_ones_with_the_routers_own_weights():
    routing = route(Dropping(Scaled(), 1))
    assert routing.topk_experts_NK[0].tolist() == [1, 2]
    assert routing.topk_probs_NK[0].tolist() == pytest.approx([0.6, 0.4])
    assert route(Dropping(Scaled(), 2)).topk_experts_NK.tolist() == [[2, 3], [1, 3], [1, 0], [3, 2]]


def test_the_strategy_decides_which_experts_are_best_and_adjusts_the_logits():
    bias_E = torch.tensor([0.0, 0.0, 0.0, 10.0])
    assert route(Scaled(bias_E)).topk_experts_NK[0].tolist() == [3, 0]
    routing = route(Dropping(Scaled(bias_E), 1))
    assert routing.topk_experts_NK[0].tolist() == [0, 1]
    assert routing.topk_probs_NK[0].tolist() == pytest.approx([4 / 7, 3 / 7])
    torch.testing.assert_close(route(Dropping(Scaled(factor=0.5), 1)).logits_NE, PROBS_NE.log() / 2)


def test_ties_are_dropped_in_the_order_of_choice():
    scores_NE = torch.zeros(1, 4)
    candidates = Candidates(0, torch.zeros(1, 1).long(), scores_NE, scores_NE.softmax(1), 2)
    left_NE = Dropping(Scaled(), 2).choice_scores(candidates)
    assert left_NE.tolist() == [[-math.inf, -math.inf, 0, 0]]
    assert topk_indices(left_NE, 2).tolist() == [[2, 3]]


@pytest.mark.parametrize("strategy", ["lf", "uniform", "logit_norm"])
def test_dropping_no_expert_is_the_unchanged_run_to_the_bit_in_any_batch_size(trained, strategy):
    run = trained(f"balancing={strategy}")
    record = dropping(run, 160, 3, None).record
    assert [point["drop"] for point in record["curve"]] == [0, 1, 2]
    expected = quality(run, 160, 3, resamples=2, seed=0).record
    assert record["curve"][0]["loss"] == expected["metrics"]["loss"]
    assert (record["metrics"]["ppl_drop_0"], record["tokens"]) == (expected["metrics"]["ppl"], expected["tokens"])
    assert len({point["loss"] for point in record["curve"]}) == 3
    other = dropping(run, 160, 16, [2, 1, 0]).record["metrics"]
    assert other == pytest.approx(record["metrics"], rel=1e-5)


def test_a_limit_to_groups_reduces_the_experts_that_can_be_dropped(trained):
    grouped = trained("balancing=lf_groups", "model.num_experts=8")
    assert [point["drop"] for point in dropping(grouped, 64, 4, None).record["curve"]] == [0, 1, 2]  # 4 of 8 are open
    with pytest.raises(UserError, match="2 of 4 experts remain"):
        dropping(grouped, 64, 4, [3])


def test_only_experts_of_the_pool_can_be_dropped(trained):
    pooled = trained("balancing=emo", "model.num_experts=8", "balancing.emo.eval_pool=3")
    assert [point["drop"] for point in dropping(pooled, 64, 4, None).record["curve"]] == [0, 1]
