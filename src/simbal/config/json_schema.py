"""JSON Schemas of the YAML files in conf/, by which an editor completes keys, explains them and marks mistakes.

A file of a group may inherit the rest of its keys, so that none is required. Numbers and choices may be interpolations.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from simbal.config.schema import VARIANTS, Config, Field, Key, fields_of

DIALECT = "http://json-schema.org/draft-07/schema#"  # which every editor knows
ROOT = "config"  # of config.yaml, other root configs of runs, and named sweeps
CLASSES = ("balancing", "analysis")  # groups whose options are classes and functions with keys of their own
INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
DEFAULTS = {"description": "configs that this one inherits or chooses, as Hydra has them", "type": "array"}
NAMES: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

Schema = dict[str, Any]


def schemas(others: Mapping[str, type]) -> dict[str, Schema]:
    """Return the schema of every group that has one by the group's name, and that of root configs as `ROOT`.

    Args:
        others: dataclasses of groups that are no part of a run's config, such as hardware.
    """
    runs = {name: field.kind for name, field in fields_of(Config).items() if field.is_group}
    groups = {name: _group(_fields(kind)) for name, kind in {**runs, **others}.items()}
    groups |= {name: _classes() for name in CLASSES}
    return {name: {"$schema": DIALECT, **schema} for name, schema in {ROOT: _root(), **groups}.items()}


def files_of(name: str) -> list[str]:
    """Return the files that a schema is for, as an editor's settings name them."""
    return ["conf/config.yaml", "sweeps/*.yaml", "conf/sweeps/*.yaml"] if name == ROOT else [f"conf/{name}/*.yaml"]


def _root() -> Schema:
    """Return the schema of a root config or a sweep: the keys of `Config`, and Hydra's own."""
    made = _group(_fields(Config))
    made["properties"]["hydra"] = {"description": "Hydra's own keys, such as hydra.sweeper.params", "type": "object"}
    return made


def _group(found: Mapping[str, list[Field]]) -> Schema:
    properties = {name: _any_of([_field(name, field) for field in fields]) for name, fields in found.items()}
    return {"type": "object", "properties": {"defaults": DEFAULTS, **properties}, "additionalProperties": False}


def _fields(schema: type) -> dict[str, list[Field]]:
    """Return the fields of a dataclass by name, those of all its forms if it has several, such as sources of data."""
    forms = VARIANTS[schema][1].values() if schema in VARIANTS else [schema]
    found: dict[str, list[Field]] = {}
    for form in forms:
        for name, field in fields_of(form).items():
            kept = found.setdefault(name, [])
            if field not in kept:
                kept.append(field)
    if schema in VARIANTS:
        name, named = VARIANTS[schema]
        found[name] = [field._replace(kind=Literal[tuple(named)]) for field in found[name]]
    return found


def _field(name: str, field: Field) -> Schema:
    if name in CLASSES:
        return {"description": field.key.meaning, **_classes()}
    if field.is_group:
        return {"description": field.key.meaning, **_group(_fields(field.kind))}
    said = {"description": field.key.meaning} if field.key.meaning else {}
    return {**said, **_value(field.kind, field.key)}


def _value(kind: Any, key: Key) -> Schema:
    """Return the schema of a value: of its type and bounds, or an interpolation."""
    exact = _type(kind, key)
    return exact if not exact or exact.get("type") == "string" else {"anyOf": [exact, INTERPOLATION]}


def _type(kind: Any, key: Key) -> Schema:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if origin is Literal:
        return {"enum": [*inner]}
    if origin is list:
        return {"type": "array", "items": _value(inner[0], key)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value(inner[1], key)}
    if inner:  # a union
        return {"anyOf": [_type(one, key) for one in inner]}
    named: Schema = {"type": NAMES[kind]}
    bounds = {"minimum": key.least, "maximum": key.most, "exclusiveMinimum": key.above}
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    return named | given if kind in (int, float) else named


def _classes() -> Schema:
    """Return the schema of a file that holds strategies or analyses by name; their classes alone know their keys."""
    keys = {
        "_target_": {"description": "the class or function that takes the other keys", "type": "string"},
        "coef": {"description": "multiplier of the loss", "anyOf": [{"type": "number", "minimum": 0}, INTERPOLATION]},
        "schedule": {"description": "points [step, factor] of coef, such as [[0,1],[400,0]]; null: constant"},
    }
    return {
        "type": "object", "properties": {"defaults": DEFAULTS},
        "additionalProperties": {"type": "object", "properties": keys},
    }  # fmt: skip


def _any_of(forms: list[Schema]) -> Schema:
    return forms[0] if len(forms) == 1 else {"anyOf": forms}
