"""The keys of strategies and analyses are typed by the signatures of their classes and functions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
import yaml

from simbal.balancing.base import Balancing
from simbal.balancing.composition import build_strategy
from simbal.config.values import check_arguments
from simbal.errors import UserError
from tests.conftest import CONF

if TYPE_CHECKING:
    pass  # type: ignore[import-not-found]

FACTS = {"num_layers": 2, "num_experts": 4, "seed": 0}


def keys_of(group, name):
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())[name]


def every(
    flag: bool = True,
    count: Annotated[int, "a note"] = 1,
    old: Optional[float] = None,  # noqa: UP045
    mode: Literal["sum", "mean"] | None = None,
    step: Literal[1, 2] = 1,
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
        {"flag": False, "count": 2, "old": 2, "mode": "mean", "step": 2},
        {"old": None, "mode": None, "names": None, "anything": None},
        {"rates": [1, 0.5], "names": ["a"], "bare": [1, "a"], "table": {"a": 1}},
        {"anything": object(), "unannotated": object(), "of_a_class": object()},
    ],
)
def test_a_value_of_the_type_of_its_parameter_is_taken(arguments):
    check_arguments("group.", every, arguments)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("flag", 1, "group.flag=1 must be true or false"),
        ("count", True, "group.count=true must be a whole number"),
        ("old", "1", "group.old=1 must be a number or null"),
        ("mode", "max", "group.mode=max must be one of sum, mean or null"),
        ("step", "1", "group.step=1 is not one of 1, 2"),
        ("rates", 0.5, "group.rates=0.5 must be a list of values, each a number"),
        ("rates", ["fast"], "group.rates=['fast'] must be a list of values, each a number"),
        ("names", [3], "group.names=[3] must be null or a list of values, each text"),
        ("bare", "a", "group.bare=a must be a list: write group.bare=[a]"),
        ("table", {"a": "b"}, "group.table.a=b must be a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_allowed(name, value, sentence):
    with pytest.raises(UserError) as error:
        check_arguments("group.", every, {name: value})
    assert str(error.value) == sentence


def needs(coef: float, *, given: int) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"coeff": 1.0}, "there is no key group.coeff: needs takes coef; did you mean coef?"),
        ({"coef": 1.0, "colour": "red"}, "there is no key group.colour: needs takes coef"),
        ({"coef": 1.0, "given": 2}, "there is no key group.given: needs takes coef"),
        ({}, "group.coef is missing: needs takes coef"),
    ],
)
def test_a_name_that_is_unknown_or_missing_is_said_with_those_that_there_are(arguments, sentence):
    with pytest.raises(UserError) as error:
        check_arguments("group.", needs, arguments, given=["given"])
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("lbl", {"coef": "abc"}, "balancing.lbl.coef=abc must be a number"),
        (
            "lbl",
            {"coeff": 1},
            "there is no key balancing.lbl.coeff: LoadBalancingLoss takes coef, gates",
        ),
        ("lbl", {"scope": "world"}, "balancing.lbl.scope=world is not one of sequence, micro, global"),
        ("lf", {"center": "no"}, "balancing.lf.center=no must be true or false"),
        ("lf", {"num_layers": 3}, "there is no key balancing.lf.num_layers: LossFree takes update_rate, bias_on"),
        ("quantile", {"smoothing": "much"}, "balancing.quantile.smoothing=much must be a number"),
        ("none", {"coef": 1}, "there is no key balancing.none.coef: NoBalancing takes no keys"),
    ],
)
def test_a_wrong_key_of_a_strategy_is_one_sentence(name, change, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        build_strategy(name, keys_of("balancing", name) | change, FACTS)
