"""Checks the keys of a strategy or an analysis against the parameters of the class or function that takes them."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from simbal.config.messages import describe_validation_error
from simbal.errors import ConfigError

STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
)


def check_arguments(
    prefix: str, function: Callable[..., Any], arguments: Mapping[str, Any], given: Collection[str] = ()
) -> None:
    """Raise `ConfigError` unless `function` takes `arguments` and each has the annotated type.

    Args:
        prefix: the dotted key of the arguments with a final dot, such as `balancing.lbl.`.
        function: a function or a class.
        arguments: values by parameter name.
        given: names of the arguments that the caller adds.
    """
    model = _arguments_model(function, frozenset(given))
    try:
        model.model_validate(dict(arguments))
    except ValidationError as error:
        fields = model.model_fields
        message = describe_validation_error(error, prefix, [f"{prefix}{name}" for name in fields])
        takes = ", ".join(fields) or "no keys"
        raise ConfigError(f"{message} ({function.__name__} takes {takes})") from None


@cache  # pydantic takes 10 ms to create a model
def _arguments_model(function: Callable[..., Any], given: frozenset[str]) -> type[BaseModel]:
    """Return a model with a field for each parameter of `function` that is not `given`."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation that is imported for type checkers only
        signature = inspect.signature(function)
    fields: dict[str, Any] = {}
    for p in signature.parameters.values():
        is_known = p.annotation is not p.empty and not isinstance(p.annotation, str)
        if p.name not in given:
            fields[p.name] = (p.annotation if is_known else Any, ... if p.default is p.empty else p.default)
    return create_model(function.__name__, __config__=STRICT, **fields)
