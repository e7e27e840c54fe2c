"""The conformance suite can fail: each deliberate mistake is caught by the check that is there for it."""

import inspect

import pytest

from simbal.balancing.base import Balancing
from tests.balancing import broken, checks
from tests.balancing.cases import Case

CAUGHT_BY = {
    broken.Undeclared: checks.says_what_it_is,
    broken.DenseGates: checks.its_gradient_reaches_the_router,
    broken.HiddenLoss: checks.its_loss_is_part_of_the_training_loss,
    broken.WrongFactor: checks.its_values_at_uniform_and_collapsed_routing_are_as_declared,
    broken.TransposedGram: checks.its_values_at_uniform_and_collapsed_routing_are_as_declared,
    broken.CoefficientTwice: checks.it_is_linear_in_its_coefficient,
    broken.ConcatenatedLayers: checks.layers_mix_only_if_declared,
    broken.RunningGlobal: checks.the_cut_into_micro_batches_matters_only_if_declared,
    broken.LastMicroBatchOnly: checks.the_cut_into_micro_batches_matters_only_if_declared,
    broken.CountsInForward: checks.activation_checkpointing_changes_nothing,
    broken.MovesInEvaluation: checks.evaluation_has_no_effect,
    broken.ForgottenBias: checks.its_state_survives_a_checkpoint,
    broken.Bf16Bias: checks.its_state_stays_fp32,
    broken.CastBias: checks.its_state_stays_fp32,
    broken.SharedBias: checks.instances_share_nothing,
    broken.LooksAhead: checks.choices_look_ahead_only_if_declared,
    broken.ExpertZeroFirst: checks.relabelling_experts_relabels_the_choice_if_declared,
    broken.FalseHope: checks.a_dead_expert_is_drawn_in_as_declared,
}


@pytest.mark.parametrize(("strategy", "check"), CAUGHT_BY.items(), ids=lambda item: item.__name__)
def test_the_mistake_is_caught(strategy, check):
    with pytest.raises(AssertionError):
        check(Case(strategy.__name__, strategy))


def test_what_they_spoil_was_good():
    for check in checks.CHECKS:
        check(Case("good", broken.GoodBias))


def test_every_broken_strategy_and_every_check_is_tried():
    classes = {each for _, each in inspect.getmembers(broken, inspect.isclass) if each.__module__ == broken.__name__}
    assert classes == {*CAUGHT_BY, broken.GoodBias}
    assert all(issubclass(each, Balancing) for each in classes)
    assert {*CAUGHT_BY.values()} == {*checks.CHECKS}
