"""The page of `--help`, from the schema and the comments in conf/; `--help GROUP` lists the keys of a group."""

import re
import textwrap
from collections.abc import Iterable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from simbal.config.options import CONF, SWEEPS, default_choices, first_comment, options
from simbal.config.schema import Config, models_of

WIDTH = 110
_KEY_LINE = re.compile(r"(\w+): *([^#\s]+)\s*(?:# *(.*))?")
TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "any value"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
SWEEP_FLAG = ("-m", "run every combination of several values: seed=0-4, balancing=simbal,lbl")
FLAGS = (
    ("--cfg job", "print the composed config and stop"),
    ("--help GROUP", "list the options and keys of a group, such as --help model"),
    ("--hydra-help", "list Hydra's own flags"),
)


def help_page(about: str, root: str, words: Iterable[str] = ()) -> str:
    """Return the help page of a program, or the pages of the groups in `words`.

    Args:
        about: a summary and examples for the top of the page.
        root: the root config of the program.
        words: the arguments of the command line.
    """
    choices = default_choices(root)
    if groups := [word for word in words if word in choices]:
        return "\n\n".join(map(_group_page, groups))
    listed = [f"    {line}" for line in (_group_line(group, choices[group]) for group in choices if group != SWEEPS)]
    sections = [about, "Groups, set by group=option (* default)\n" + "\n".join(listed)] if listed else [about]
    sections.append("Keys, set by key=value\n" + _columns(_root_keys(root)))
    if listed:
        sections[-1] += "\n    and the keys of each group, such as optim.lr=1e-3"
    if SWEEPS in choices:
        sections.append(f"Named sweeps, run by -m sweeps=NAME (--help sweeps)\n    {_wrap(', '.join(options(SWEEPS)))}")
    sections.append("Flags\n" + _columns([SWEEP_FLAG, *FLAGS] if SWEEPS in choices else FLAGS))
    return "\n\n".join(sections)


def describe_type(annotation: Any) -> str:
    """Describe a type for users, such as `integer or null`."""
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
    """Describe the bounds of a key, such as `≥ 1`; "" without bounds."""
    bounds = [(sign, getattr(bound, name, None)) for bound in field.metadata for name, sign in BOUNDS.items()]
    return ", ".join(f"{sign} {bound:,}" for sign, bound in bounds if bound is not None)


def _group_line(group: str, selected: list[str]) -> str:
    return _wrap(f"{group}: " + ", ".join(name + "*" * (name in selected) for name in options(group)))


def _group_page(group: str) -> str:
    page, keys = group, dict[str, str]()
    if group in Config.model_fields:
        page += f": {Config.model_fields[group].description}"
        for model in models_of(Config.model_fields[group].annotation):
            for name, field in model.model_fields.items():
                kind = ", ".join(filter(None, (describe_type(field.annotation), describe_bounds(field))))
                text = f"{field.description} [{kind}]"
                same = keys.setdefault(f"{group}.{name}", text) == text
                keys[f"{group}.{name}"] = text if same else str(field.description)
    rows = [(option, " ".join(first_comment(file))) for option, file in options(group).items()]
    page += f"\n\nOptions\n{_columns(rows)}"
    return f"{page}\n\nKeys\n{_columns(keys.items())}" if keys else page


def _root_keys(root: str) -> Iterable[tuple[str, str]]:
    for line in (CONF / f"{root}.yaml").read_text(encoding="utf-8").splitlines():
        if match := _KEY_LINE.fullmatch(line):
            yield f"{match[1]}={match[2]}", match[3] or ""


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH - 4, subsequent_indent="      ")


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"    {left:<{width}}  {right}".rstrip() for left, right in rows)
