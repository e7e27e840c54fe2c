"""The strategy behaves as declared, and its loss equals the formula."""

from pathlib import Path

import pytest
import torch

from NAME.balancing import Mine
from simbal.conformance import CHECKS, E, cases_of_file, losses, route

CASES = cases_of_file(Path(__file__).parents[1] / "conf/balancing/mine.yaml")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategy_keeps_its_declared_properties(case, check):
    check(case)


@pytest.mark.parametrize(("logit", "value"), [(0.0, 0.0), (50.0, 0.01 * (E - 1))], ids=["uniform", "collapsed"])
def test_loss_equals_the_value_computed_by_hand(logit, value):
    x_ND = torch.full((24, 1), logit)  # every token has the logits (logit, 0, ..., 0)
    routing = route(x_ND, torch.eye(E)[:, :1], CASES[0], Mine())
    assert losses(Mine(), [routing]).item() == pytest.approx(value, abs=1e-6)
