"""The list of mistakes matches the code, so that `make mutants` can test each."""

from collections import Counter

from tests.mutants.__main__ import REPOSITORY, mistakes

SOURCE = REPOSITORY / "src" / "simbal"


def test_the_code_of_every_mistake_occurs_once_in_its_file():
    found = {(m.file, m.code): (SOURCE / m.file).read_text(encoding="utf-8").count(m.code) for m in mistakes()}
    assert {place: count for place, count in found.items() if count != 1} == {}


def test_no_mistake_is_listed_twice_or_changes_nothing():
    made = Counter((m.file, m.code, m.wrong) for m in mistakes())
    assert len(made) == made.total() >= 60
    assert all(code != wrong for _, code, wrong in made)


def test_its_tests_exist():
    assert all((REPOSITORY / path).exists() for mistake in mistakes() for path in mistake.tests)
