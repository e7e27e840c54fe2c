"""Checks the keys of a strategy or an analysis against the parameters of the class or function that takes them."""

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from simbal.config.messages import describe_validation_error
from simbal.errors import ConfigError

FACTS = ("num_layers", "num_experts", "seed")  # arguments that the program passes to strategies that take them
STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
)
PLAIN_TYPES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict)}


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
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation that is imported for type checkers only
        signature = inspect.signature(function)
    fields: dict[str, Any] = {}
    for p in signature.parameters.values():
        is_known = p.annotation is not p.empty and not isinstance(p.annotation, str)
        if p.name not in given:
            fields[p.name] = (p.annotation if is_known else Any, ... if p.default is p.empty else p.default)
    _validate(prefix, create_model(function.__name__, __config__=STRICT, **fields), arguments)


def check_strategy(name: str, keys: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the class named by `_target_` takes the other keys; the class is not imported.

    If the parameters cannot be read from its source, the keys are checked when the run builds the class.
    """
    if model := parameters_of(str(keys["_target_"])):
        arguments = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
        _validate(f"balancing.{name}.", model, arguments)


@cache
def parameters_of(target: str) -> type[BaseModel] | None:
    """Return a model of a class's parameters, read from its source; None if they cannot be read.

    Importing the class would import torch, which takes seconds.
    """
    module, _, name = target.rpartition(".")
    tree = _parse_module(module)
    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if node is None:
        return None
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is None:
        return _inherited_parameters(module, tree, node)
    if init.args.kwarg or init.args.vararg:
        return None
    positional = init.args.args[1:]
    defaults = [*[None] * (len(positional) - len(init.args.defaults)), *init.args.defaults, *init.args.kw_defaults]
    fields: dict[str, Any] = {
        parameter.arg: (_to_type(parameter.annotation), ... if default is None else ast.unparse(default))
        for parameter, default in zip([*positional, *init.args.kwonlyargs], defaults, strict=True)
        if parameter.arg not in FACTS
    }
    return create_model(target, __config__=STRICT, **fields)


@cache
def _parse_module(module: str) -> ast.Module:
    """Parse a module's source without importing its package; return an empty tree if it is not found."""
    package, *parts = module.split(".")
    spec = find_spec(package) if package else None
    folders = [*(spec.submodule_search_locations or [])] if spec else []
    files = [Path(folder, *parts).with_suffix(".py") for folder in folders] if parts else []
    if spec and spec.origin and not parts:
        files = [Path(spec.origin)]  # a module outside a package, or a package's __init__.py
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    return ast.parse(text)


def _inherited_parameters(module: str, tree: ast.Module, subclass: ast.ClassDef) -> type[BaseModel] | None:
    """Return the parameters of the first base class of a class without `__init__`."""
    base = subclass.bases[0].id if subclass.bases and isinstance(subclass.bases[0], ast.Name) else None
    modules = {
        alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    if base in (None, "Module"):
        return create_model(subclass.name, __config__=STRICT)
    return parameters_of(f"{modules.get(base, module)}.{base}")


def _to_type(annotation: ast.expr | None) -> Any:
    """Return the type of an annotation; `Any` for a type from another module, which the class checks itself."""
    match annotation:
        case ast.Name(id=name):
            return PLAIN_TYPES.get(name, Any)
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_to_type(left), _to_type(right)]  # noqa: UP007  # None | None is not a type
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return list[_to_type(item)]  # type: ignore[misc]
    return Any


def _validate(prefix: str, model: type[BaseModel], arguments: Mapping[str, Any]) -> None:
    try:
        model.model_validate(dict(arguments))
    except ValidationError as error:
        message = describe_validation_error(error, prefix, [f"{prefix}{name}" for name in model.model_fields])
        takes = ", ".join(model.model_fields) or "no keys"
        raise ConfigError(f"{message} ({model.__name__.rpartition('.')[2]} takes {takes})") from None
