"""One page for each folder of conf/: what its keys mean, as the schema says it, and its options as they stand there."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from generators.markup import code, prose, table
from simbal.cli.help import describe_bounds, describe_type
from simbal.config import options as conf_options
from simbal.config.options import first_comment, option_keys, options, root_keys
from simbal.config.schema import GROUPS, Config, is_hashed, models_of

LONGEST = 24  # signs of a value in a table; the option's YAML stands below it
HEADINGS = ("key", "default", "type", "bounds", "meaning", "another value is")


def configuration_pages(root: Path) -> dict[str, str]:
    """Return `reference/conf/<group>.md` for every group, and `reference/conf/index.md`, which lists them."""
    groups = list(groups_of(root / "conf"))
    defaults = default_choices(root / "conf")
    pages = {page_of(group): _group_page(root, group, defaults.get(group, [])) for group in groups}
    rows = [(f"[{group}]({group.replace('/', '_')}.md)", _chosen(defaults.get(group, []))) for group in groups]
    parts = [
        "# Configuration\n",
        "Every key is overridden by `key=value`, every group by `group=option`. `--cfg job` prints the config that a "
        "command composes to.\n",
        table(("group", "default"), rows),
        *(_root_part(file) for file in sorted((root / "conf").glob("*.yaml"))),
    ]
    return {"reference/conf/index.md": "\n".join(parts), **pages}


def groups_of(conf: Path) -> Iterable[str]:
    """Yield every folder that holds options, by its path in conf/; a linked one too."""
    for folder in sorted(path for path in conf.iterdir() if path.is_dir()):
        for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
            if any(place.glob("*.yaml")):
                yield place.relative_to(conf).as_posix()


def page_of(group: str) -> str:
    """Return the path of a group's page in the site."""
    return f"reference/conf/{group.replace('/', '_')}.md"


def default_choices(conf: Path) -> dict[str, list[str]]:
    """Return what the programs choose in each group; where they differ, what `train.py` does."""
    choices: dict[str, list[str]] = {}
    for file in sorted(conf.glob("*.yaml")):
        for group, chosen in conf_options.default_choices(file.stem).items():
            choices.setdefault(group, chosen)
    return choices


def body(file: Path) -> str:
    """Return an option's YAML as it stands, less the comment at its top."""
    lines = file.read_text(encoding="utf-8").splitlines()
    while lines and lines[0].startswith("#"):
        del lines[0]
    return code("\n".join(lines), "yaml") if lines else ""


def about(file: Path) -> str:
    """Return the comment at an option's top, line by line."""
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
    """Return the tables of a group's keys; "" without a schema, as strategies and analyses have none."""
    field = Config.model_fields.get(group)
    models = models_of(field.annotation) if field else []
    if field is None or not models:
        return ""
    shared = {name: key for name, key in models[0].model_fields.items() if all(name in m.model_fields for m in models)}
    text = "## Keys\n\n" + _table(f"{group}.", shared, option_keys(group, chosen[0]), is_hashed(field))
    for model in models:
        own = {name: key for name, key in model.model_fields.items() if name not in shared}
        if own:
            option = next(name for name, file in options(group).items() if own.keys() <= conf_options.read(file).keys())
            rows = _table(f"{group}.", own, option_keys(group, option), is_hashed(field))
            text += f"\n### Only in {option}\n\n{rows}"
    return text


def _table(prefix: str, keys: Mapping[str, FieldInfo], defaults: Mapping[str, Any], hashed: bool = True) -> str:
    """Return the table of keys; `hashed` says whether their group can change the result."""
    return table(
        HEADINGS,
        [
            (
                f"`{prefix}{name}`",
                _default(defaults.get(f"{prefix}{name}", "")),
                _type(field.annotation),
                describe_bounds(field),
                prose(str(field.description)),
                "another run" if hashed and is_hashed(field) else "the same run",
            )
            for name, field in keys.items()
        ],
    )


def _type(annotation: Any) -> str:
    """Return a type in words, but choices as they are typed, one below the other."""
    if get_origin(annotation) is Literal:
        return "<br>".join(f"`{choice}`" for choice in get_args(annotation))
    return prose(describe_type(annotation))


def _default(value: object) -> str:
    text = "" if value in ("", {}) else yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
    return f"`{text}`" if 0 < len(text) <= LONGEST else "below" * bool(text)


def _root_part(file: Path) -> str:
    """Return the section of a program's root config; the keys of `train.py` have a schema."""
    keys = ""
    if file.stem == "config":
        own = {name: field for name, field in Config.model_fields.items() if name not in GROUPS}
        keys = _table("", own, root_keys(file.stem))
    return f"## {file.name}\n\n{about(file)}\n{keys}\n{body(file)}"


def _chosen(chosen: list[str]) -> str:
    named = [f"`{option}`" for option in chosen if option != "???"]
    return " and ".join(named) or "none"
