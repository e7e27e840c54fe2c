"""The keys of strategies and analyses are checked against the parameters of their classes and functions."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional

import pytest

from simbal.balancing.base import Balancing
from simbal.balancing.composition import build_strategy
from simbal.config.options import option_keys
from simbal.config.signatures import check_arguments
from simbal.errors import ConfigError


def function(
    flag: bool = True,
    count: Annotated[int, "a note"] = 1,
    old: Optional[float] = None,  # noqa: UP045
    mode: Literal["sum", "mean"] | None = None,
    rates: Sequence[float] = (),
    names: list[str] | None = None,
    anything: Any = None,
    unannotated=None,
    of_a_class: Balancing | None = None,
) -> None: ...


def test_values_of_the_annotated_types_are_accepted():
    check_arguments("group.", function, {"flag": False, "count": 2, "old": 2, "mode": "mean", "rates": [1, 0.5]})
    check_arguments("group.", function, {"old": None, "mode": None, "names": ["a"], "unannotated": object()})


@pytest.mark.parametrize(
    ("name", "value"),
    [("flag", 1), ("count", True), ("old", "1"), ("mode", "max"), ("rates", ["fast"]), ("names", [3]), ("nam", 1)],
)
def test_wrong_argument_is_named_by_its_dotted_key(name, value):
    with pytest.raises(ConfigError, match=rf"group\.{name}\b"):
        check_arguments("group.", function, {name: value})


def needs(coef: float, *, given: int) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"coeff": 1.0, "coef": 1.0}, "coeff"), ({"coef": 1.0, "given": 2}, "given"), ({}, "coef")],
)
def test_error_lists_the_parameters(arguments, key):
    with pytest.raises(ConfigError, match=rf"group\.{key}\b.*\(needs takes coef\)$"):
        check_arguments("group.", needs, arguments, given=["given"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lbl", {"coef": "abc"}), ("lbl", {"coeff": 1}), ("lf", {"center": "no"}), ("lf", {"num_layers": 3}),
        ("quantile", {"smoothing": "much"}), ("none", {"coef": 1}),
    ],
)  # fmt: skip
def test_wrong_key_of_a_strategy_is_refused_when_it_is_built(name, change):
    prefix = f"balancing.{name}."
    keys = {key.removeprefix(prefix): value for key, value in option_keys("balancing", name).items()} | change
    with pytest.raises(ConfigError, match=prefix + next(iter(change))):
        build_strategy(name, keys, {"num_layers": 2, "num_experts": 4, "seed": 0})
