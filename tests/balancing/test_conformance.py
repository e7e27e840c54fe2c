"""Every strategy keeps the properties that it declares, and the conformance suite catches deliberate mistakes.

A new YAML file in conf/balancing is tested without any change here.
"""

import inspect
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from simbal import conformance
from simbal.balancing.composition import Composition
from simbal.conformance import CHECKS, Case, composed_module, state, train
from tests.balancing import broken
from tests.balancing.cases import ALL_CASES, CASES, EVERY_STRATEGY

CAUGHT_BY = {
    broken.Undeclared: conformance.it_declares_properties_formula_and_citation,
    broken.DenseGates: conformance.its_gradient_reaches_the_router,
    broken.HiddenLoss: conformance.its_loss_is_part_of_the_training_loss,
    broken.CoefficientTwice: conformance.it_is_linear_in_its_coefficient,
    broken.SecretReader: conformance.its_loss_ignores_tokens_only_if_declared,
    broken.ConcatenatedLayers: conformance.layers_mix_only_if_declared,
    broken.RunningGlobal: conformance.micro_batches_matter_only_if_declared,
    broken.LastMicroBatchOnly: conformance.micro_batches_matter_only_if_declared,
    broken.CountsInForward: conformance.activation_checkpointing_changes_nothing,
    broken.MovesInEvaluation: conformance.evaluation_has_no_effect,
    broken.ForgottenBias: conformance.its_state_survives_a_checkpoint,
    broken.CastBias: conformance.its_state_stays_fp32,
    broken.SharedBias: conformance.instances_share_nothing,
    broken.LooksAhead: conformance.choices_look_ahead_only_if_declared,
    broken.ExpertZeroFirst: conformance.relabeling_experts_relabels_the_choice_only_if_declared,
    broken.FalseHope: conformance.dead_experts_revive_only_if_declared,
    broken.OwnBatch: conformance.a_prefix_is_routed_as_in_the_full_sequence,
    broken.ChoiceInEvaluation: conformance.a_prefix_is_routed_as_in_the_full_sequence,
    broken.KeepsStrangeWeights: conformance.weights_match_the_chosen_experts,
}


@pytest.mark.parametrize(("strategy", "check"), CAUGHT_BY.items(), ids=lambda item: item.__name__)
def test_each_deliberate_mistake_is_caught_by_its_check(strategy, check):
    with pytest.raises(AssertionError):
        check(Case(strategy.__name__, strategy))


@pytest.mark.parametrize("good", [broken.GoodBias, broken.GoodThreshold])
def test_the_base_classes_of_broken_strategies_pass(good):
    for check in CHECKS:
        check(Case("good", good))


def test_every_broken_strategy_and_every_check_is_tried():
    classes = {each for _, each in inspect.getmembers(broken, inspect.isclass) if each.__module__ == broken.__name__}
    assert classes == {*CAUGHT_BY, broken.GoodBias, broken.GoodThreshold}
    assert {*CAUGHT_BY.values()} == {*CHECKS}


def pairs() -> Iterator:
    """Yield each case with each check; `emo` changes at each of the 3000 steps that may revive an expert."""
    for case, check in product(ALL_CASES, CHECKS):
        is_slow = case.name == "emo" and check is conformance.dead_experts_revive_only_if_declared
        marks = [pytest.mark.slow] if is_slow or case not in CASES else []
        yield pytest.param(case, check, id=f"{case}-{check.__name__}", marks=marks)


@pytest.mark.parametrize(("case", "check"), [*pairs()])
def test_a_strategy_keeps_what_it_declares(case, check):
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_state_of_every_strategy_is_fp32_whatever_the_default_dtype(dtype):
    for case in EVERY_STRATEGY:
        torch.set_default_dtype(dtype)
        try:
            strategy = case.make()
        finally:
            torch.set_default_dtype(torch.float32)
        if any(True for _ in strategy.buffers()):
            module = composed_module(Composition({"it": strategy}, {}), case.gating)
            train(module, range(1))
            assert {tensor.dtype for tensor in state(module).values()} <= {torch.float32, torch.int64}, case
