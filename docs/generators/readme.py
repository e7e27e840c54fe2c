"""README.md as pages: one for each section, in its order, with links between them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import relpath

from generators.examples import example_page
from generators.markup import WIDE, slug
from generators.results import FOLDER as RESULTS

OWN_STRATEGY = "Your own strategy"  # a subsection with a page of its own
OWN_STRATEGY_PAGE = "own-strategy.md"
WHOLE_FILES = {"benchmarks/RESULTS.md": "measured.md", "CHANGELOG.md": "changes.md"}
_HEADING = re.compile(r"(#+) (.+)")
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+://)([^)\s]+)\)")


@dataclass(frozen=True)
class Section:
    """A part of a Markdown text, from one heading to the next of the same level; the level starts at 1."""

    title: str
    text: str  # without the heading

    @property
    def page(self) -> str:
        """Where it stands in the site."""
        return OWN_STRATEGY_PAGE if self.title == OWN_STRATEGY else f"guide/{slug(self.title)}.md"


def readme_pages(root: Path) -> dict[str, str]:
    """Every page by its path in the site; the part before the first section is `index.md`."""
    intro, sections = split((root / "README.md").read_text(encoding="utf-8"), 2)
    pages: list[Section] = []
    for section in sections:
        before, parts = split(section.text, 3)
        own = [part for part in parts if part.title == OWN_STRATEGY]
        rest = "".join(f"### {part.title}\n{part.text}" for part in parts if part not in own)
        pages += [Section(section.title, before + rest), *own]
    anchors = {slug(name): page.page for page in pages for name in (page.title, *_headings(page.text))}
    made = {"index.md": WIDE + relinked(intro, "index.md", root, anchors)}
    for page in pages:
        text = raised(page.text, 2 if page.title == OWN_STRATEGY else 1)
        made[page.page] = f"# {page.title}\n{relinked(text, page.page, root, anchors)}"
    return made


def whole_files(root: Path) -> dict[str, str]:
    """The other files that are pages as they are."""
    found = {page: root / file for file, page in WHOLE_FILES.items() if (root / file).is_file()}
    return {page: relinked(file.read_text(encoding="utf-8"), page, root, {}) for page, file in found.items()}


def split(text: str, level: int) -> tuple[str, list[Section]]:
    """What stands before the first heading of this level, and the sections that such headings open."""
    intro, sections = "", []
    for line, heading in _lines(text):
        if heading and len(heading[1]) == level:
            sections.append(Section(heading[2], ""))
        elif sections:
            sections[-1] = Section(sections[-1].title, sections[-1].text + line)
        else:
            intro += line
    return intro, sections


def raised(text: str, levels: int) -> str:
    """Every heading by so many levels nearer to the top."""
    return "".join(line[levels:] if heading else line for line, heading in _lines(text))


def relinked(text: str, page: str, root: Path, anchors: Mapping[str, str]) -> str:
    """Links to a section or to a file of docs/ or results/ lead there from `page`; other files are named only."""

    def target(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        path = path.removeprefix("./").removeprefix("README.md")
        there = WHOLE_FILES.get(path) or example_page(path.removeprefix("docs/"))
        if not path:
            own_page = anchors.get(anchor) in (None, page)
            return f"[{link[1]}]({'' if own_page else relpath(anchors[anchor], Path(page).parent)}#{anchor})"
        if path.startswith(f"{RESULTS}/"):
            return f"[{link[1]}]({relpath(path, Path(page).parent)})"
        if path in WHOLE_FILES or (there != path and (root / path).is_file()):
            return f"[{link[1]}]({relpath(there, Path(page).parent)}{anchor and '#' + anchor})"
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return "".join(line if fenced else _LINK.sub(target, line) for line, fenced in _fences(text))


def _headings(text: str) -> list[str]:
    return [heading[2] for _, heading in _lines(text) if heading]


def _lines(text: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    """Every line, and the heading that it is."""
    for line, fenced in _fences(text):
        yield line, None if fenced else _HEADING.match(line)


def _fences(text: str) -> Iterator[tuple[str, bool]]:
    """Every line, and whether it is code: a comment there is no heading, and a bracket no link."""
    fenced = False
    for line in text.splitlines(keepends=True):
        fence = line.startswith(("```", "~~~"))
        yield line, fenced or fence or line.startswith("    ")
        fenced ^= fence
