"""`0-4` means 0, 1, 2, 3, 4, and nothing else is touched."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from simbal.config import spans
from simbal.errors import ConfigError

PARSER = OverridesParser.create()
NUMBERS = st.integers(0, 10**6)


def lines(*given_lines):
    return [override.input_line for override in spans.parse(given_lines, {"seed", "model.top_k"}, PARSER)]


@pytest.mark.parametrize(
    ("values", "expanded"),
    [
        ("0-4", "0,1,2,3,4"),
        ("0-8:2", "0,2,4,6,8"),
        ("0-7:3", "0,3,6"),
        ("0-2,7", "0,1,2,7"),
        ("7,0-2,10-11", "7,0,1,2,10,11"),
        ("3-3", "3"),
        ("7", "7"),
        ("-3", "-3"),
        ("1e-3", "1e-3"),
        ("null", "null"),
    ],
)
def test_spans_are_inclusive_and_mix_with_single_values(values, expanded):
    assert spans.expand(values) == expanded


@given(first=NUMBERS, length=st.integers(0, 200), step=st.integers(1, 9))
def test_a_span_is_every_step_from_its_first_to_its_last_number(first, length, step):
    values = [int(value) for value in spans.expand(f"{first}-{first + length}:{step}").split(",")]
    assert values == [number for number in range(first, first + length + 1) if (number - first) % step == 0]


@given(st.text(), st.sampled_from("'\"[](){}"), st.text())
def test_text_with_quotes_or_brackets_stays_as_it_is(before, mark, after):
    values = f"{before}{mark}{after}"
    assert spans.expand(values) == values


@given(NUMBERS, st.integers(1, 10**6))
def test_a_span_that_counts_down_is_an_error_that_says_how_to_write_it(low, extra):
    with pytest.raises(ConfigError, match=f"{low + extra}-{low} .*{low}-{low + extra}"):
        spans.expand(f"{low + extra}-{low}")


def test_only_whole_number_keys_have_spans():
    assert lines("seed=0-2", "name=2024-2026", "model.top_k=1-2,4", "~seed") == [
        "seed=0,1,2",
        "name=2024-2026",
        "model.top_k=1,2,4",
        "~seed",
    ]
