"""`0-4` means 0, 1, 2, 3, 4 for integer keys, and other values are unchanged."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.config import spans
from simbal.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "expanded"),
    [
        ("0-4", "0,1,2,3,4"), ("0-8:2", "0,2,4,6,8"), ("0-7:3", "0,3,6"), ("0-2,7", "0,1,2,7"), ("3-3", "3"),
        ("7,0-2,10-11", "7,0,1,2,10,11"), ("7", "7"), ("-3", "-3"), ("1e-3", "1e-3"), ("null", "null"),
        ("'0-4'", "'0-4'"), ("[0-4]", "[0-4]"), ("range(0-4)", "range(0-4)"),
    ],
)  # fmt: skip
def test_spans_are_inclusive_and_mix_with_single_values(values, expanded):
    assert spans.expand(values) == expanded


@pytest.mark.parametrize(("span", "message"), [("4-0", "4-0 .*0-4"), ("0-4:0", "0-4"), ("0-1000000000", "10000")])
def test_invalid_span_is_refused(span, message):
    with pytest.raises(ConfigError, match=message):
        spans.expand(span)


def test_only_integer_keys_have_spans():
    lines = ["seed=0-2", "name=2024-2026", "model.top_k=1-2,4", "~seed"]
    overrides = spans.parse(lines, {"seed", "model.top_k"}, OverridesParser.create())
    assert [override.input_line for override in overrides] == [
        "seed=0,1,2", "name=2024-2026", "model.top_k=1,2,4", "~seed",
    ]  # fmt: skip
