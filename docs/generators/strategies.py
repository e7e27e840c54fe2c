"""The strategies of conf/balancing: what each declares of itself, built with the keys of its file."""

from dataclasses import fields
from inspect import getdoc
from pathlib import Path

import yaml

from generators import source
from generators.analyses import paragraphs
from generators.configuration import about, body
from generators.markup import prose, slug, table
from simbal.balancing.base import Balancing, Properties
from simbal.balancing.composition import build_strategy
from simbal.config.options import option_keys, options

FACTS = {"num_layers": 4, "num_experts": 16, "seed": 0}  # those of model=tiny; nothing shown depends on them


def strategies_page(root: Path) -> str:
    """Return the page: what is declared, side by side, then a section for each option of `balancing=`."""
    built = {name: _built(file) for name, file in options("balancing").items()}
    names = [field.name for field in fields(Properties)]
    declared = [
        (f"[{name}](#{slug(name)})", *(_value(getattr(part.properties, field)) for field in names))
        for name, parts in built.items()
        for part in parts.values()
    ]
    meanings = source.fields(root / "src/simbal/balancing/base.py")["Properties"]
    parts = [
        "# Strategies in detail\n",
        "The test suite holds every strategy to what it declares here.\n",
        table(("`balancing=`", *(name.replace("_", " ") for name in names)), declared),
        table(("property", "meaning"), [(name.replace("_", " "), _meaning(name, meanings)) for name in names]),
        *(_section(root, name, part) for name, part in built.items()),
    ]
    return "\n".join(parts)


def _built(file: Path) -> dict[str, Balancing]:
    """Return the strategies of a file's own; none if it composes others."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {name: build_strategy(name, keys, FACTS) for name, keys in content.items() if name != "defaults"}


def _section(root: Path, option: str, parts: dict[str, Balancing]) -> str:
    file = root / "conf/balancing" / f"{option}.yaml"
    text = f"## {option}\n\n{about(file)}\n"
    names = dict.fromkeys(key.split(".")[1] for key in option_keys("balancing", option) if key.startswith("balancing."))
    composed = [name for name in names if name not in parts]
    if composed:
        links = " and ".join(f"[{name}](#{slug(name)})" for name in composed)
        return f"{text}The same as `balancing=[{','.join(composed)}]`: {links}.\n"
    for part in parts.values():
        kind = type(part)
        text += f"{paragraphs(getdoc(kind) or '')}\n{_declared(part)}\n{body(file)}\n"
        text += f"Class: [`{kind.__name__}`][{kind.__module__}.{kind.__qualname__}]\n"
    return text


def _declared(part: Balancing) -> str:
    rows = [
        ("formula", prose(part.formula)),
        ("source", prose(part.citation)),
        ("effective coefficient of", prose(part.unit) if part.properties.differentiable else ""),
        ("preferred start of the router", prose(part.router_init)),
        ("state in a checkpoint", ", ".join(f"`{name}`" for name, _ in part.named_buffers())),
    ]
    return table(("declared", ""), [(name, text) for name, text in rows if text])


def _meaning(name: str, meanings: dict[str, tuple[str, str]]) -> str:
    kind, comment = meanings[name]
    return prose(comment) or kind.removeprefix("Literal[").removesuffix("]").replace("'", "")


def _value(declared: object) -> str:
    return ("no", "yes")[declared] if isinstance(declared, bool) else str(declared)
