"""Every registered strategy keeps every promise that it declares; a new YAML file in conf/balancing is enough."""

import pytest

from tests.balancing import loss_checks, training_checks
from tests.balancing.cases import CASES


@pytest.mark.parametrize("check", loss_checks.CHECKS + training_checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)
