"""What the site is generated from is complete before mkdocs sees it; tests/docs/test_site.py looks at what it makes."""

import re
import sys
from html import unescape

import pytest

from simbal.config.schema import GROUPS, every_key
from tests.conftest import CONF

ROOT = CONF.parent


@pytest.fixture(scope="module")
def site():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
        from generators import site

        yield site


@pytest.fixture(scope="module")
def pages(site):
    return site.generated_pages(ROOT)


def test_every_module_that_a_page_shows_is_there(pages):
    shown = re.findall(r"^::: (\S+)", "\n".join(pages.values()), re.MULTILINE)
    assert len(shown) > 20
    files = [ROOT / "src" / name.replace(".", "/") for name in shown]
    assert [str(file) for file in files if not file.with_suffix(".py").is_file()] == []


def test_every_guide_has_its_place(site):
    assert sorted(site.GUIDES) == sorted(file.stem for file in (ROOT / "docs/guide").glob("*.md"))


def test_every_page_that_is_generated_has_its_place(site, pages):
    def flat(tree):
        if isinstance(tree, str):
            return [tree]
        return [place for part in (tree.values() if isinstance(tree, dict) else tree) for place in flat(part)]

    named = flat(site.navigation(pages))
    own = {page for page in pages if page.endswith(".md") and not page.startswith("results/")}
    assert own <= {*named}
    assert len(named) == len({*named})


@pytest.mark.parametrize("page", ["strategies", "analyses"])
def test_every_strategy_and_analysis_is_described(pages, page):
    folder = {"strategies": "balancing", "analyses": "analysis"}[page]
    words = {*re.findall(r"\w+", pages[f"reference/{page}.md"])}
    assert {file.stem for file in (CONF / folder).glob("*.yaml")} <= words


@pytest.mark.parametrize("group", sorted({file.parent.name for file in CONF.glob("*/*.yaml")}))
def test_every_option_of_a_group_is_described(pages, group):
    words = {*re.findall(r"\w+", pages[f"reference/conf/{group}.md"])}
    assert {file.stem for file in (CONF / group).glob("*.yaml")} <= words


def test_every_key_of_a_run_is_described(pages):
    for name in every_key():
        group = name.partition(".")[0]
        if name not in GROUPS:
            page = f"reference/conf/{group if group in GROUPS else 'index'}.md"
            assert name in unescape(pages[page]), name
