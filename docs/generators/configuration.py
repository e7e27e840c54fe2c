"""One page for each folder of conf/: its options as they stand there, and what their keys mean."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from generators import source
from generators.markup import code, prose, table
from simbal.catalogue import Catalogue, first_comment

SCHEMAS = ("src/simbal/config.py", "src/simbal/data_config.py")
LONGEST = 24  # signs of a value in a table; the option's YAML stands below it


def configuration_pages(root: Path) -> dict[str, str]:
    """`reference/conf/<group>.md` for every group, and `reference/conf/index.md`, which lists them."""
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
    """Every folder that holds options, by its path in conf/; a linked one too."""
    for folder in sorted(path for path in conf.iterdir() if path.is_dir()):
        for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
            if any(place.glob("*.yaml")):
                yield place.relative_to(conf).as_posix()


def page_of(group: str) -> str:
    """Where a group's page stands in the site."""
    return f"reference/conf/{group.replace('/', '_')}.md"


def default_choices(conf: Path) -> dict[str, list[str]]:
    """What the programs choose in each group; `train.py`'s word counts first."""
    choices: dict[str, list[str]] = {}
    for file in sorted(conf.glob("*.yaml")):
        for group, chosen in Catalogue([conf], file.stem).default_choices().items():
            choices.setdefault(group, chosen)
    return choices


def options(root: Path, group: str) -> dict[str, Path]:
    """The files of a group by the option's name."""
    return {file.stem: file for file in sorted((root / "conf" / group).glob("*.yaml"))}


def body(file: Path) -> str:
    """An option's YAML as it stands, less the comment at its top."""
    lines = file.read_text(encoding="utf-8").splitlines()
    while lines and lines[0].startswith("#"):
        del lines[0]
    return code("\n".join(lines), "yaml") if lines else ""


def about(file: Path) -> str:
    """The comment at an option's top, line by line."""
    return "  \n".join(prose(line) for line in first_comment(file)) + "\n"


def _group_page(root: Path, group: str, chosen: list[str]) -> str:
    parts = [
        f"# {group}\n",
        f"`{group}=` one of the options below; default: {_chosen(chosen)}.\n",
        _keys(root, group, chosen),
    ]
    for option, file in options(root, group).items():
        parts.append(f"## {option}\n\n{about(file)}\n{body(file)}")
    return "\n".join(part for part in parts if part)


def _keys(root: Path, group: str, chosen: list[str]) -> str:
    """Keys of the typed schemas that carry the group's name; strategies and analyses bring their own keys."""
    classes = {name: keys for file in SCHEMAS for name, keys in source.fields(root / file).items()}
    whole = classes["Config"].get(group, ("",))[0]
    if whole not in classes or not chosen:
        return ""
    rows = []
    for name in (whole, *_subclasses(root, whole)):
        variant = name.removesuffix("Config").lower()
        option = variant if variant in options(root, group) else chosen[0]
        values = Catalogue([root / "conf"]).option_keys(group, option)
        comments = _comments(options(root, group)[option])
        for key, (kind, meaning) in classes[name].items():
            value = _default(values.get(f"{group}.{key}", ""))
            described = prose(meaning or comments.get(key, ""))
            rows.append((f"`{group}.{key}`", value, f"`{kind}`", described, "" if name == whole else variant))
    headings = ("key", "default", "type", "meaning", "only in")
    shown = len(headings) if any(row[-1] for row in rows) else -1
    return "## Keys\n\n" + table(headings[:shown], [row[:shown] for row in rows])


def _subclasses(root: Path, name: str) -> list[str]:
    return [node.name for file in SCHEMAS for node in source.classes(root / file) if name in source.bases(node)]


def _comments(file: Path) -> dict[str, str]:
    """By key, those of an option's file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {line.partition(":")[0]: source.comment(line) for line in lines if ":" in line}


def _default(value: object) -> str:
    text = "" if value in ("", {}) else yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
    return f"`{text}`" if 0 < len(text) <= LONGEST else "below" * bool(text)


def _root_part(file: Path) -> str:
    return f"## {file.name}\n\n{about(file)}\n{body(file)}"


def _chosen(chosen: list[str]) -> str:
    named = [f"`{option}`" for option in chosen if option != "???"]
    return " and ".join(named) or "none"
