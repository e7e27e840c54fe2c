"""Generate the reference page of balancing strategies: the declarations of each class, grouped as in the guide."""

import re
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
from simbal.config.options import option_keys, options, read
from simbal.config.values import flatten

FACTS = {"num_layers": 4, "num_experts": 16, "seed": 0}  # the shape of model=tiny; the page does not depend on it
UNGROUPED = "Other strategies"


def strategies_page(root: Path) -> str:
    """Return the page: for each group of the guide, a table of properties and a section per option."""
    built = {name: _built(file) for name, file in options("balancing").items()}
    meanings = source.fields(root / "src/simbal/balancing/base.py")["Properties"]
    properties = [field.name for field in fields(Properties)]
    lines = [
        "# Strategies in detail\n",
        "The tests check that each strategy has the properties that it declares.\n",
        table(("property", "meaning"), [(name.replace("_", " "), _meaning(name, meanings)) for name in properties]),
    ]
    for title, names in _groups(root / "docs/guide/strategies.md", [*built]).items():
        declared = [
            (f"[{name}](#{slug(name)})", *(_value(getattr(part.properties, key)) for key in properties))
            for name in names
            for part in built[name].values()
        ]
        lines += [f"## {title}\n", table(("`balancing=`", *(name.replace("_", " ") for name in properties)), declared)]
        lines += [_section(root, name, built[name]) for name in names]
    return "\n".join(lines)


def _groups(guide: Path, names: list[str]) -> dict[str, list[str]]:
    """Group the options by the heading of the guide's table that lists them; the rest is `UNGROUPED`."""
    groups: dict[str, list[str]] = {}
    for section in guide.read_text(encoding="utf-8").split("\n## ")[1:]:
        cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
        listed = [name for name in re.findall(r"`(\w+)`", cells) if name in names]
        new = [name for name in listed if not any(name in group for group in groups.values())]
        if new:
            groups[section.partition("\n")[0]] = new
    rest = [name for name in names if not any(name in group for group in groups.values())]
    return groups | ({UNGROUPED: rest} if rest else {})


def _built(file: Path) -> dict[str, Balancing]:
    """Return the strategies that a file defines; none if it only combines strategies of other files."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {name: build_strategy(name, keys, FACTS) for name, keys in content.items() if "_target_" in keys}


def _section(root: Path, option: str, parts: dict[str, Balancing]) -> str:
    file = root / "conf/balancing" / f"{option}.yaml"
    text = f"### {option}\n\n{about(file)}\n"
    names = dict.fromkeys(key.split(".")[1] for key in option_keys("balancing", option) if key.startswith("balancing."))
    composed = [name for name in names if name not in parts]
    if composed:
        links = " and ".join(f"[{name}](#{slug(name)})" for name in composed)
        own = flatten({key: keys for key, keys in read(file).items() if key != "defaults"}, "balancing.")
        settings = "".join(f" {key}={value}" for key, value in own.items())
        return f"{text}The same as `'balancing=[{','.join(composed)}]'{settings}`: {links}.\n"
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
        ("preferred router.init", prose(part.router_init)),
        ("state in a checkpoint", ", ".join(f"`{name}`" for name, _ in part.named_buffers())),
    ]
    return table(("declared", ""), [(name, text) for name, text in rows if text])


def _meaning(name: str, meanings: dict[str, tuple[str, str]]) -> str:
    kind, comment = meanings[name]
    return prose(comment) or kind.removeprefix("Literal[").removesuffix("]").replace("'", "")


def _value(declared: object) -> str:
    return ("no", "yes")[declared] if isinstance(declared, bool) else str(declared)
