"""The page of `--help`, from the schema and the comments in conf/; `--help GROUP` lists the keys of a group."""

import re
import textwrap
from collections.abc import Iterable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from simbal.config.options import CONF, SWEEPS, default_choices, first_comment, options
from simbal.config.schema import Config, models_of

_KEY_LINE = re.compile(r"(\w+): *([^#\s]*)\s*(?:# *(.*))?")
WIDTH = 110
TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "any value"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
SWEEP_FLAG = ("-m", "run every combination of several values: seed=0-4, balancing=simbal,lbl")
FLAGS = (
    ("--cfg job", "print the composed config and stop"),
    ("--help GROUP", "list the options and keys of a group, such as --help model"),
    ("--hydra-help", "list Hydra's own flags"),
)


def help_page(about: str, root: str, topics: Iterable[str] = ()) -> str:
    """Return the page of a program.

    Args:
        about: what the program does, and examples; it opens the page.
        root: the root config.
        topics: groups to list in full instead.
    """
    choices = default_choices(root)
    if listed := [topic for topic in topics if topic in choices]:
        return "\n\n".join(_group_page(group) for group in listed)
    sections = [about.strip()]
    if groups := [group for group in choices if group != SWEEPS]:
        sections.append(
            "Groups, set by group=option (* default)\n" + "\n".join(_group(name, choices[name]) for name in groups)
        )
    sections.append("Keys, set by key=value\n" + _columns(_root_keys(root)))
    if groups:
        sections[-1] += "\n    and the keys of each group, such as optim.lr=1e-3"
    if SWEEPS in choices:
        sections.append("Named sweeps, run by -m sweeps=NAME (--help sweeps)\n" + _wrapped("", options(SWEEPS)))
    sections.append("Flags\n" + _columns([SWEEP_FLAG, *FLAGS] if SWEEPS in choices else FLAGS))
    return "\n\n".join(sections)


def describe_type(annotation: Any) -> str:
    """Return a type in words, such as `integer or null`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, inner))
    if origin is list:
        return f"list of {describe_type(inner[0])}"
    if origin is dict:
        return f"mapping to {describe_type(inner[1])}"
    if hasattr(annotation, "__metadata__"):
        return describe_type(annotation.__origin__)
    return TYPES.get(annotation, "any value")


def describe_bounds(field: FieldInfo) -> str:
    """Return the bounds of a key, such as `≥ 1`, or nothing."""
    given = [(sign, getattr(bound, name, None)) for bound in field.metadata for name, sign in BOUNDS.items()]
    return ", ".join(f"{sign} {bound:,}" for sign, bound in given if bound is not None)


def group_keys(group: str) -> dict[str, FieldInfo]:
    """Return the keys of a group by their dotted names; none for a group without a schema."""
    models = models_of(Config.model_fields[group].annotation) if group in Config.model_fields else []
    return {f"{group}.{name}": field for model in models for name, field in model.model_fields.items()}


def _group(group: str, chosen: list[str]) -> str:
    names = [name + "*" * (name in chosen) for name in options(group)]
    return _wrapped(f"{group}: ", names)


def _group_page(group: str) -> str:
    about = f": {Config.model_fields[group].description}" if group in Config.model_fields else ""
    rows = [(option, " ".join(first_comment(file))) for option, file in options(group).items()]
    keys = []
    for name, field in group_keys(group).items():
        kind = ", ".join(filter(None, (describe_type(field.annotation), describe_bounds(field))))
        keys.append((name, f"{field.description} [{kind}]"))
    return f"{group}{about}\n\nOptions\n{_columns(rows)}" + (f"\n\nKeys\n{_columns(keys)}" if keys else "")


def _root_keys(root: str) -> Iterable[tuple[str, str]]:
    for line in (CONF / f"{root}.yaml").read_text(encoding="utf-8").splitlines():
        if (match := _KEY_LINE.fullmatch(line)) and match[2]:
            yield f"{match[1]}={match[2]}", match[3] or ""


def _wrapped(label: str, names: Iterable[str]) -> str:
    return textwrap.fill(label + ", ".join(names), WIDTH, initial_indent="    ", subsequent_indent="      ")


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"    {left:<{width}}  {right}".rstrip() for left, right in rows)
