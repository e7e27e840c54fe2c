"""Every registered strategy keeps every promise that it declares; a new YAML file in conf/balancing is enough."""

import pytest

from simbal import balancing
from simbal.conformance import CHECKS
from tests.balancing.cases import CASES
from tests.balancing.loss_values import its_values_at_uniform_and_collapsed_routing_are_those_of_its_formula, values_of
from tests.balancing.ragged_example import its_choice_on_the_example_is_the_one_worked_out_by_hand

EVERY = [
    *CHECKS,
    its_values_at_uniform_and_collapsed_routing_are_those_of_its_formula,
    its_choice_on_the_example_is_the_one_worked_out_by_hand,
]


@pytest.mark.parametrize("check", EVERY, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)


def test_the_values_of_every_loss_of_the_package_are_worked_out_by_hand():
    strategies = [case.make() for case in CASES]
    own = [strategy for strategy in strategies if type(strategy).__name__ in balancing.__all__]
    assert len(own) > 20
    assert [strategy for strategy in own if values_of(strategy) is None] == []
