"""The generated pages describe every module, strategy, analysis, option and key, and are all in the menu."""

import re
from html import unescape

import pytest

from simbal.config.options import options
from simbal.config.schema import GROUPS, every_key
from tests.conftest import CONF

ROOT = CONF.parent
OPTION_GROUPS = sorted({file.parent.name for file in CONF.glob("*/*.yaml")})


@pytest.fixture(scope="module")
def site():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        from generators import site

        yield site


@pytest.fixture(scope="module")
def pages(site):
    return site.generated_pages(ROOT)


def words_of(page):
    return {*re.findall(r"\w+", page)}


def test_every_module_on_a_page_exists(pages):
    modules = re.findall(r"^::: (\S+)", "\n".join(pages.values()), re.MULTILINE)
    assert len(modules) > 20
    files = [ROOT / "src" / name.replace(".", "/") for name in modules]
    assert [str(file) for file in files if not file.with_suffix(".py").is_file()] == []


def test_every_guide_and_every_generated_page_is_in_the_menu(site, pages):
    def flat(tree):
        if isinstance(tree, str):
            return [tree]
        return [place for part in (tree.values() if isinstance(tree, dict) else tree) for place in flat(part)]

    assert sorted([*site.GUIDES, "how_to"]) == sorted(file.stem for file in (ROOT / "docs/guide").glob("*.md"))
    menu = flat(site.navigation(pages))
    assert {page for page in pages if page.endswith(".md") and not page.startswith("results/")} <= {*menu}
    assert len(menu) == len({*menu})


def test_every_strategy_analysis_option_and_key_is_described(pages):
    assert options("balancing").keys() <= words_of(pages["reference/strategies.md"])
    assert options("analysis").keys() <= words_of(pages["reference/analyses.md"])
    for group in OPTION_GROUPS:
        assert {file.stem for file in (CONF / group).glob("*.yaml")} <= words_of(pages[f"reference/conf/{group}.md"])
    for name in every_key().keys() - {*GROUPS}:
        group = name.partition(".")[0]
        assert name in unescape(pages[f"reference/conf/{group if group in GROUPS else 'index'}.md"]), name
