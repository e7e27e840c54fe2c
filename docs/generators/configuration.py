"""Generate one page per folder of conf/: its keys, from the schema, and its options."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from generators.markup import code, prose, table
from simbal.cli.help import describe_bounds, describe_type
from simbal.config import options as conf_options
from simbal.config.options import first_comment, option_keys, options
from simbal.config.schema import GROUPS, Config, is_hashed, models_of

LONGEST = 24  # maximum length of a default in a list of keys; longer defaults are only in the YAML below


def configuration_pages(root: Path) -> dict[str, str]:
    """Return `reference/conf/<group>.md` for every group, and `reference/conf/index.md`, which lists them."""
    groups = list(groups_of(root / "conf"))
    defaults = default_choices(root / "conf")
    pages = {page_of(group): _group_page(root, group, defaults.get(group, [])) for group in groups}
    rows = [(f"[{group}]({group.replace('/', '_')}.md)", _chosen(defaults.get(group, []))) for group in groups]
    parts = [
        "# Configuration\n",
        "Override a key with `key=value`, and choose an option with `group=option`. `--cfg job` prints the composed "
        "config of a command.\n",
        table(("group", "default"), rows),
        *(_root_part(file) for file in sorted((root / "conf").glob("*.yaml"))),
    ]
    return {"reference/conf/index.md": "\n".join(parts), **pages}


def groups_of(conf: Path) -> Iterable[str]:
    """Yield the path in conf/ of each folder with options, including symbolic links."""
    for folder in sorted(path for path in conf.iterdir() if path.is_dir()):
        for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
            if any(place.glob("*.yaml")):
                yield place.relative_to(conf).as_posix()


def page_of(group: str) -> str:
    """Return the path of a group's page in the site."""
    return f"reference/conf/{group.replace('/', '_')}.md"


def default_choices(conf: Path) -> dict[str, list[str]]:
    """Return the default options of each group. If programs have different defaults, the first program counts."""
    choices: dict[str, list[str]] = {}
    for file in sorted(conf.glob("*.yaml")):
        for group, chosen in conf_options.default_choices(file.stem).items():
            choices.setdefault(group, chosen)
    return choices


def body(file: Path) -> str:
    """Return the YAML of an option without the comment at the top."""
    lines = file.read_text(encoding="utf-8").splitlines()
    while lines and lines[0].startswith("#"):
        del lines[0]
    return code("\n".join(lines), "yaml") if lines else ""


def about(file: Path) -> str:
    """Return the comment at the top of an option, line by line."""
    return "  \n".join(prose(line) for line in first_comment(file)) + "\n"


def _group_page(root: Path, group: str, chosen: list[str]) -> str:
    parts = [
        f"# {group}\n",
        f"`{group}=` one of the options below; default: {_chosen(chosen)}.\n",
        _keys(group, chosen),
    ]
    for option, file in options(group).items():
        parts.append(f"## {option}\n\n{about(file)}\n{body(file)}")
    return "\n".join(part for part in parts if part)


def _keys(group: str, chosen: list[str]) -> str:
    """Return the lists of a group's keys. Strategies and analyses have no schema, so they get ""."""
    field = Config.model_fields.get(group)
    models = models_of(field.annotation) if field else []
    if field is None or not models:
        return ""
    shared = {name: key for name, key in models[0].model_fields.items() if all(name in m.model_fields for m in models)}
    text = "## Keys\n\n" + _list(f"{group}.", shared, option_keys(group, chosen[0]), is_hashed(field))
    for model in models:
        extra = {name: key for name, key in model.model_fields.items() if name not in shared}
        if extra:
            keys_of = {name: conf_options.read(file).keys() for name, file in options(group).items()}
            option = next(name for name, keys in keys_of.items() if extra.keys() <= keys)
            rows = _list(f"{group}.", extra, option_keys(group, option), is_hashed(field))
            text += f"\n### Only in {option}\n\n{rows}"
    return text


def _list(prefix: str, keys: Mapping[str, FieldInfo], defaults: Mapping[str, Any], hashed: bool = True) -> str:
    """Return a definition list: each key with its type, bounds and default, then its meaning.

    `hashed` says whether the keys of the group are part of the config hash.
    """
    items = []
    for name, field in keys.items():
        default = _default(defaults.get(f"{prefix}{name}", ""))
        facts = [_type(field.annotation), describe_bounds(field), f"default {default}" if default else ""]
        meaning = prose(str(field.description))
        if not (hashed and is_hashed(field)):
            meaning += ". A run can resume with a different value"
        items.append(f"`{prefix}{name}` ({'; '.join(fact for fact in facts if fact)})\n:   {meaning}\n")
    return "\n".join(items)


def _type(annotation: Any) -> str:
    """Describe a type, or list its choices."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(annotation))
    return prose(describe_type(annotation))


def _default(value: object) -> str:
    text = "" if value in ("", {}) else yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
    return f"`{text}`" if 0 < len(text) <= LONGEST else "below" * bool(text)


def _root_part(file: Path) -> str:
    """Return the section of a program's root config; the keys of `train.py` have a schema."""
    keys = ""
    if file.stem == "config":
        fields = {name: field for name, field in Config.model_fields.items() if name not in GROUPS}
        keys = _list("", fields, conf_options.read(file))
    return f"## {file.name}\n\n{about(file)}\n{keys}\n{body(file)}"


def _chosen(chosen: list[str]) -> str:
    named = [f"`{option}`" for option in chosen if option != "???"]
    return " and ".join(named) or "none"
