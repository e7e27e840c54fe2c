"""The keys of strategies and analyses are checked against the signatures of their classes and functions."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Annotated, Any, Literal, Optional

import pytest

from simbal.balancing.base import Balancing
from simbal.balancing.composition import import_strategy, build_strategy
from simbal.config.options import option_keys, options
from simbal.config.signatures import FACTS, check_arguments, check_strategy, parameters_of
from simbal.errors import ConfigError

GIVEN = {"num_layers": 2, "num_experts": 4, "seed": 0}
TARGETS = {
    name: target
    for option in options("balancing")
    for name, target in option_keys("balancing", option).items()
    if name.endswith("._target_")
}


def every(
    flag: bool = True,
    count: Annotated[int, "a note"] = 1,
    old: Optional[float] = None,  # noqa: UP045
    mode: Literal["sum", "mean"] | None = None,
    rates: Sequence[float] = (),
    names: list[str] | None = None,
    bare: list = [],  # noqa: B006
    table: Mapping[str, int] = {},
    anything: Any = None,
    unannotated=None,
    of_a_class: Balancing | None = None,
) -> None: ...


@pytest.mark.parametrize(
    "arguments",
    [
        {"flag": False, "count": 2, "old": 2, "mode": "mean"},
        {"old": None, "mode": None, "names": None, "anything": None},
        {"rates": [1, 0.5], "names": ["a"], "bare": [1, "a"], "table": {"a": 1}},
        {"anything": object(), "unannotated": object()},
    ],
)
def test_a_value_of_the_type_of_its_parameter_is_taken(arguments):
    check_arguments("group.", every, arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flag", 1), ("count", True), ("old", "1"), ("mode", "max"), ("rates", 0.5), ("rates", ["fast"]),
        ("names", [3]), ("bare", "a"), ("table", {"a": "b"}),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_key(name, value):
    with pytest.raises(ConfigError, match=f"^group.{name}"):
        check_arguments("group.", every, {name: value})


def needs(coef: float, *, given: int) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"coeff": 1.0, "coef": 1.0}, "coeff"), ({"coef": 1.0, "given": 2}, "given"), ({}, "coef")],
)
def test_a_key_that_is_unknown_or_missing_is_named_with_those_that_exist(arguments, key):
    with pytest.raises(ConfigError, match=rf"group\.{key}\b.*\(needs takes coef\)$"):
        check_arguments("group.", needs, arguments, given=["given"])


@pytest.mark.parametrize("name", TARGETS)
def test_the_parameters_read_from_the_source_are_those_of_the_class(name):
    kind = import_strategy("x", TARGETS[name])
    of_class = signature(kind).parameters
    model = parameters_of(TARGETS[name])
    assert model is not None
    assert {*model.model_fields} == {*of_class} - {*FACTS}
    required = {key for key, field in model.model_fields.items() if field.is_required()}
    assert required == {key for key, p in of_class.items() if p.default is p.empty and key not in FACTS}


def test_a_class_whose_source_is_not_found_is_left_to_the_run():
    check_strategy("mine", {"_target_": "no.such.Class", "coef": "x"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lbl", {"coef": "abc"}), ("lbl", {"coeff": 1}), ("lf", {"center": "no"}), ("lf", {"num_layers": 3}),
        ("quantile", {"smoothing": "much"}), ("none", {"coef": 1}),
    ],
)  # fmt: skip
def test_a_wrong_key_of_a_strategy_is_refused_before_the_run_and_when_it_is_built(name, change):
    prefix = f"balancing.{name}."
    keys = {key.removeprefix(prefix): value for key, value in option_keys("balancing", name).items()} | change
    for check in (check_strategy, lambda *given: build_strategy(*given, GIVEN)):
        with pytest.raises(ConfigError, match=prefix + next(iter(change))):
            check(name, keys)
