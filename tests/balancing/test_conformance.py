"""Every registered strategy keeps every promise that it declares; a new YAML file in conf/balancing is enough."""

import pytest

from tests.balancing.cases import CASES
from tests.balancing.checks import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)
