"""The documentation site is complete and loads nothing from another host."""

import ast
import inspect
import re
from html import unescape
from importlib import import_module

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


def text_of(page) -> str:
    html = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    html = re.sub(r"</(p|li|td|th|h\d|div)>", " ", html)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


def definitions() -> dict[str, str]:
    """The definition of every metric of a run and of every analysis."""
    found = {metric.key: metric.definition for metric in (*VALIDATION, *SIMILARITY, *NUMBERS, *TRAINING)}
    for file in (ROOT / "src/simbal").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for literal in re.findall(r"^DEFINITION = (\{.*?^\})", text, re.MULTILINE | re.DOTALL):
            found |= {f"{file.stem}: {key}": meaning for key, meaning in ast.literal_eval(literal).items()}
    return found


def test_site_defines_every_number(site):
    text, known = text_of(site / "reference/definitions.html"), definitions()
    assert len(known) > 60
    assert {key for key, meaning in known.items() if plain(meaning) not in text} == set()
    assert {metric.title for metric in NUMBERS if metric.title not in text} == set()


def test_site_shows_the_help_of_every_program(site, monkeypatch):
    monkeypatch.setenv(STARTED_BY_NAME, "1")
    text = text_of(site / "reference/commands.html")
    for program in PROGRAMS.values():
        module, _, function = program.function.partition(":")
        assert plain(format_command(inspect.getdoc(getattr(import_module(module), function)))) in text
    scripts = {path.name for path in ROOT.glob("*.py")}
    assert scripts == {*re.findall(r"In a checkout also python (\w+\.py)", text)}


def test_readme_links_to_every_guide_and_to_files_that_exist(site):
    links = re.findall(r"\]\((?!https:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert {f"docs/guide/{guide.name}" for guide in GUIDES} <= {*links}
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert {guide.stem for guide in GUIDES} <= {page.stem for page in site.glob("guide/*.html")}


def test_site_loads_nothing_from_another_host(site):
    pages = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.html"))
    assert re.findall(r"<(?:script|img|iframe|source|link)\b[^>]* (?:src|href)=[\"']?(?:https?:)?//[^>]*", pages) == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert "@media" in styles
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", styles) == []
