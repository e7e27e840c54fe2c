"""Checks the keys of a strategy or an analysis against the parameters of the class or function that takes them."""

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Union, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from simbal.config.messages import of_pydantic
from simbal.errors import ConfigError

FACTS = ("num_layers", "num_experts", "seed")  # the program passes these to strategies that ask for them
STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
)
PLAIN = {kind.__name__: kind for kind in (int, float, str, bool, list, dict)}


def check_arguments(
    prefix: str, function: Callable[..., Any], arguments: Mapping[str, Any], given: Collection[str] = ()
) -> None:
    """Raise `ConfigError` unless `function` takes `arguments`, each of the type that its signature says.

    Args:
        prefix: the dotted key of the arguments, such as `balancing.lbl.`.
        function: a function or a class.
        arguments: the values by name.
        given: names of further arguments, which the caller adds.
    """
    try:
        target = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
        hints = get_type_hints(target, include_extras=True)
    except NameError:  # a type that is imported for the type checker alone
        hints = {}
    parameters: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name not in given
    }
    _validate(prefix, create_model(function.__name__, __config__=STRICT, **parameters), arguments)


def check_strategy(name: str, keys: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the class that `_target_` names takes the other keys. The class is not imported.

    A class whose parameters cannot be read from its source is checked when the run builds it.
    """
    if model := parameters_of(str(keys["_target_"])):
        own = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
        _validate(f"balancing.{name}.", model, own)


@cache
def parameters_of(target: str) -> type[BaseModel] | None:
    """Return a model of the parameters of a class, read from its source; None if they cannot be read.

    Importing the class would import torch, which takes seconds.
    """
    module, _, name = target.rpartition(".")
    tree = _source(module)
    found = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if found is None:
        return None
    init = next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None:
        return _inherited(module, tree, found)
    if init.args.kwarg or init.args.vararg:
        return None
    parameters = [*init.args.args[1:], *init.args.kwonlyargs]
    required = len(init.args.args) - 1 - len(init.args.defaults)
    defaults = [*[None] * required, *init.args.defaults, *init.args.kw_defaults]
    fields: dict[str, Any] = {
        parameter.arg: (_type(parameter.annotation), ... if default is None else ast.unparse(default))
        for parameter, default in zip(parameters, defaults, strict=True)
        if parameter.arg not in FACTS
    }
    return create_model(target, __config__=STRICT, **fields)


@cache
def _source(module: str) -> ast.Module:
    """Return the parsed source of a module, found by its path; empty if there is none."""
    package, *parts = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None or spec.submodule_search_locations is None:
        files = [Path(str(spec.origin))] if spec and spec.origin and not parts else []
    else:
        folders = [Path(place, *parts) for place in spec.submodule_search_locations]
        files = [file for folder in folders for file in (folder.with_suffix(".py"), folder / "__init__.py")]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    return ast.parse(text)


def _inherited(module: str, tree: ast.Module, found: ast.ClassDef) -> type[BaseModel] | None:
    """Return the parameters of the first base class of a class without `__init__`."""
    base = found.bases[0].id if found.bases and isinstance(found.bases[0], ast.Name) else None
    places = {alias.name: n.module for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    if base in (None, "Module"):
        return create_model(found.name, __config__=STRICT)
    return parameters_of(f"{places.get(base, module)}.{base}")


def _type(annotation: ast.expr | None) -> Any:
    """Return the type that an annotation names; `Any` for a type of another module, which the class checks."""
    match annotation:
        case ast.Name(id=name):
            return PLAIN.get(name, Any)
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_type(left), _type(right)]  # noqa: UP007  # None | None is no type
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return list[_type(item)]  # type: ignore[misc]
    return Any


def _validate(prefix: str, model: type[BaseModel], arguments: Mapping[str, Any]) -> None:
    try:
        model.model_validate(dict(arguments))
    except ValidationError as error:
        names = [f"{prefix}{name}" for name in model.model_fields]
        takes = ", ".join(model.model_fields) or "no keys"
        raise ConfigError(
            f"{of_pydantic(error, prefix, names)} ({model.__name__.rpartition('.')[2]} takes {takes})"
        ) from None
