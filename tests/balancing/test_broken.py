"""The conformance suite can fail: each deliberate mistake is caught by the check that is there for it."""

import inspect

import pytest

from simbal import conformance
from simbal.balancing.base import Balancing
from simbal.conformance import CHECKS, Case
from tests.balancing import broken
from tests.balancing.loss_values import its_values_at_uniform_and_collapsed_routing_are_those_of_its_formula
from tests.balancing.ragged_example import its_choice_on_the_example_is_the_one_worked_out_by_hand

EVERY = [
    *CHECKS,
    its_values_at_uniform_and_collapsed_routing_are_those_of_its_formula,
    its_choice_on_the_example_is_the_one_worked_out_by_hand,
]
CAUGHT_BY = {
    broken.Undeclared: conformance.it_declares_properties_formula_and_citation,
    broken.DenseGates: conformance.its_gradient_reaches_the_router,
    broken.HiddenLoss: conformance.its_loss_is_part_of_the_training_loss,
    broken.WrongFactor: its_values_at_uniform_and_collapsed_routing_are_those_of_its_formula,
    broken.TransposedGram: its_values_at_uniform_and_collapsed_routing_are_those_of_its_formula,
    broken.CoefficientTwice: conformance.it_is_linear_in_its_coefficient,
    broken.SecretReader: conformance.its_loss_ignores_tokens_only_if_declared,
    broken.ConcatenatedLayers: conformance.layers_mix_only_if_declared,
    broken.RunningGlobal: conformance.micro_batches_matter_only_if_declared,
    broken.LastMicroBatchOnly: conformance.micro_batches_matter_only_if_declared,
    broken.MicroBatchController: conformance.micro_batches_matter_only_if_declared,
    broken.CountsInForward: conformance.activation_checkpointing_changes_nothing,
    broken.MovesInEvaluation: conformance.evaluation_has_no_effect,
    broken.ForgottenBias: conformance.its_state_survives_a_checkpoint,
    broken.ForgottenMomentum: conformance.its_state_survives_a_checkpoint,
    broken.Bf16Bias: conformance.its_state_stays_fp32,
    broken.CastBias: conformance.its_state_stays_fp32,
    broken.SharedBias: conformance.instances_share_nothing,
    broken.LooksAhead: conformance.choices_look_ahead_only_if_declared,
    broken.ExpertZeroFirst: conformance.relabeling_experts_relabels_the_choice_only_if_declared,
    broken.SilentGroups: conformance.relabeling_experts_relabels_the_choice_only_if_declared,
    broken.FalseHope: conformance.dead_experts_revive_only_if_declared,
    broken.OwnBatch: conformance.a_prefix_is_routed_as_in_the_full_sequence,
    broken.ChoiceInEvaluation: conformance.a_prefix_is_routed_as_in_the_full_sequence,
    broken.KeepsStrangeWeights: conformance.weights_match_the_chosen_experts,
    broken.WithoutTheLast: its_choice_on_the_example_is_the_one_worked_out_by_hand,
    broken.CountsTheDropped: its_choice_on_the_example_is_the_one_worked_out_by_hand,
    broken.RenormalisesTheRest: its_choice_on_the_example_is_the_one_worked_out_by_hand,
}


@pytest.mark.parametrize(("strategy", "check"), CAUGHT_BY.items(), ids=lambda item: item.__name__)
def test_the_mistake_is_caught(strategy, check):
    with pytest.raises(AssertionError):
        check(Case(strategy.__name__, strategy))


@pytest.mark.parametrize("check", EVERY, ids=lambda check: check.__name__)
def test_what_they_spoil_was_good(check):
    for good in (broken.GoodBias, broken.GoodThreshold):
        check(Case("good", good))


def test_every_broken_strategy_and_every_check_is_tried():
    classes = {each for _, each in inspect.getmembers(broken, inspect.isclass) if each.__module__ == broken.__name__}
    assert classes == {*CAUGHT_BY, broken.GoodBias, broken.GoodThreshold}
    assert all(issubclass(each, Balancing) for each in classes)
    assert {*CAUGHT_BY.values()} == {*EVERY}
