"""The documentation site is complete, its links work, and it loads nothing from another host."""

import ast
import inspect
import re
from importlib import import_module
from posixpath import join, normpath
from urllib.parse import unquote, urlsplit

import pytest

from simbal.cli.main import PROGRAMS
from simbal.commands import STARTED_BY_NAME, format_command
from simbal.metrics.definitions import NUMBERS, SIMILARITY, TRAINING, VALIDATION
from tests.conftest import CONF

ROOT = CONF.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs/guide").glob("*.md"))
pytestmark = pytest.mark.slow  # runs mkdocs


def plain(text: str) -> str:
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").split())  # links by their text


def definitions() -> dict[str, str]:
    """The definition of every metric of a run and of every analysis."""
    found = {metric.key: metric.definition for metric in (*VALIDATION, *SIMILARITY, *NUMBERS, *TRAINING)}
    for file in (ROOT / "src/simbal").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for literal in re.findall(r"^DEFINITION = (\{.*?^\})", text, re.MULTILINE | re.DOTALL):
            found |= {f"{file.stem}: {key}": meaning for key, meaning in ast.literal_eval(literal).items()}
    return found


def test_site_defines_every_number(site):
    text, known = site.page("reference/definitions.html").text, definitions()
    assert len(known) > 60
    assert {key for key, meaning in known.items() if plain(meaning) not in text} == set()
    assert {metric.title for metric in NUMBERS if metric.title not in text} == set()


def test_site_shows_the_help_of_every_program(site, monkeypatch):
    monkeypatch.setenv(STARTED_BY_NAME, "1")
    text = site.page("reference/commands.html").text
    for program in PROGRAMS.values():
        module, _, function = program.function.partition(":")
        assert plain(format_command(inspect.getdoc(getattr(import_module(module), function)))) in text
    scripts = {path.name for path in ROOT.glob("*.py")}
    assert scripts == {*re.findall(r"In a checkout also python (\w+\.py)", text)}


def test_readme_links_to_every_guide_and_to_files_that_exist(site):
    links = re.findall(r"\]\((?!https:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert {f"docs/guide/{guide.name}" for guide in GUIDES} <= {*links}
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert {f"guide/{guide.stem}.html" for guide in GUIDES} <= {*site.pages}


def test_every_link_and_anchor_inside_the_site_works(site):
    broken = []
    for path in (page for page in site.pages if page != "404.html"):  # its address depends on the server
        for link in {*site.page(path).links, *site.page(path).resources}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = normpath(join(path, "..", unquote(parts.path))) if parts.path else path
            anchors = site.page(target).ids if target in site.pages else set()
            if not (site.folder / target).is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append((path, link))
    assert broken == []


def test_site_loads_nothing_from_another_host(site):
    resources = {resource for path in site.pages for resource in site.page(path).resources}
    assert [resource for resource in resources if urlsplit(resource).netloc] == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.folder.rglob("*.css"))
    assert "@media" in styles
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", styles) == []
