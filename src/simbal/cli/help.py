"""The page of `--help`: groups, options, keys and named sweeps, in the words of the YAML files' comments."""

import re
from collections.abc import Iterable

from simbal.config.catalogue import MISSING, SWEEPS, Catalogue, first_comment

_KEY_LINE = re.compile(r"(\w+): *([^#\s]*)\s*(?:# *(.*))?")
SWEEP_FLAG = ("-m", "run every combination of the values given: seed=0-4, balancing=simbal,lbl")
FLAGS = (
    ("--cfg job", "print the config that the overrides compose to, and run nothing"),
    ("--hydra-help", "Hydra's own flags"),
)


def help_page(about: str, catalogue: Catalogue) -> str:
    """Return the whole page, as text; `about` opens it."""
    groups = [group for group in catalogue.default_choices() if group != SWEEPS]
    sections = [about.strip()]
    if groups:
        sections.append("Groups, overridden by group=option; * marks the default")
    sections += [_group(group, catalogue) for group in groups]
    sections.append("Keys, overridden by key=value\n" + _columns(_keys(catalogue)))
    if groups:
        sections[-1] += "\n    ... and those of the options chosen: --cfg job prints all of them"
    if catalogue.options.get(SWEEPS):
        sections.append("Named sweeps, run by -m sweeps=NAME\n" + _columns(_sweeps(catalogue)))
    sections.append("Flags\n" + _columns([SWEEP_FLAG, *FLAGS] if SWEEPS in catalogue.options else FLAGS))
    return "\n\n".join(sections)


def _group(group: str, catalogue: Catalogue) -> str:
    chosen = catalogue.default_choices()[group]
    rows = []
    for option, file in catalogue.options[group].items():
        mark = "* " if option in chosen else "  "
        rows.append((mark + option, " ".join(first_comment(file)[:1])))
    heading = f"  {group}, to be chosen: one, or several as [a,b]" if chosen == [MISSING] else f"  {group}"
    return f"{heading}\n{_columns(rows)}"


def _keys(catalogue: Catalogue) -> Iterable[tuple[str, str]]:
    for line in catalogue.root_file(catalogue.root).read_text(encoding="utf-8").splitlines():
        if (match := _KEY_LINE.fullmatch(line)) and match[2] and match[1] in catalogue.root_keys():
            yield f"{match[1]}={match[2]}", match[3] or ""


def _sweeps(catalogue: Catalogue) -> Iterable[tuple[str, str]]:
    for name, file in catalogue.options[SWEEPS].items():
        for number, line in enumerate(first_comment(file)):
            yield "" if number else name, line


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"    {left:<{width}}  {right}".rstrip() for left, right in rows)
