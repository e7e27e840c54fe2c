"""The documentation site in headless Chromium, opened from its folder; skipped where there is none."""

import pytest

from tests.child_processes import wait_until
from tests.report.page.test_browser import browser, emulate, pytestmark, requested

__all__ = ["browser", "pytestmark"]
NETWORK = ("http", "ws", "//")
PAGES = ("index.html", "tutorial.html", "guide/resuming.html", "reference/strategies.html",
         "reference/definitions.html", "api/balancing.html")  # fmt: skip


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_pages_fit_the_screen_and_ask_nobody_for_anything(browser, site, width, dark):
    emulate(browser, width, dark)
    browser.get_log("performance")
    for page in PAGES:
        browser.get((site.folder / page).as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
        assert browser.execute_script("return document.querySelector('h1').getBoundingClientRect().height") > 20
    assert browser.get_log("browser") == []
    assert [url for url in requested(browser) if url.startswith(NETWORK)] == []


def test_the_colours_follow_the_system(browser, site):
    seen = []
    for dark in (False, True):
        emulate(browser, 1280, dark)
        browser.get((site.folder / "index.html").as_uri())
        seen.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert seen[0] != seen[1]


def test_search_works_without_a_server(browser, site):
    emulate(browser, 1280)
    browser.get((site.folder / "index.html").as_uri())
    browser.find_element("css selector", "input.md-search__input").send_keys("sinkhorn")
    wait_until(lambda: browser.find_elements("css selector", ".md-search-result__link"))
    found = browser.find_elements("css selector", ".md-search-result__link")
    assert any("strategies.html" in link.get_attribute("href") for link in found)
    assert [url for url in requested(browser) if url.startswith(NETWORK)] == []
