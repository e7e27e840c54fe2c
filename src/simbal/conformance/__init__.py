"""The conformance suite: checks that hold a strategy to what it declares, for a test of your own too.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("case", cases_of_file(Path("conf/balancing/mine.yaml")), ids=str)
    def test_it_keeps_what_it_declares(case, check):
        check(case)

Each check raises AssertionError if a promise is broken, or one that is declared broken is not.
"""

from simbal.conformance import choice_checks, loss_checks, training_checks
from simbal.conformance.case import Case, cases_of, cases_of_file

CHECKS = [*loss_checks.CHECKS, *choice_checks.CHECKS, *training_checks.CHECKS]

__all__ = ["CHECKS", "Case", "cases_of", "cases_of_file"]
