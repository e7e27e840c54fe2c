"""The page in headless Chromium; skipped where there is none."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from simbal.report.report import report
from tests.child_processes import wait_until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver (apt-get install)"),
]
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator["webdriver.Chrome"]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        driver.quit()


@pytest.fixture
def page(browser, write_run, analyse, sweep):
    """The address of a page with all that a page can have, long names among it."""
    for balancing in ("lbl", "simbal"):
        for seed in (0, 2, 10):
            analyse(write_run(balancing, seed, keys={"data.cache_dir": "x"}))
    write_run("simbal", 3, status="failed", error="a long error " * 20 + "without_a_space" * 30)
    (sweep / "sweep.json").write_text(json.dumps({"command": f"train.py {'x' * 300}", "runs": {"never-1": "seed=99"}}))
    report(sweep)
    return (sweep / "index.html").as_uri()


def emulate(browser, width: int, dark: bool = False) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def column(browser, place: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#runs tbody tr')].map(r => r.cells[arguments[0]].textContent.trim())"
    )
    return browser.execute_script(script, place)


def requested(browser) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_it_loads_without_a_word_of_complaint_and_without_a_network(browser, page):
    browser.get_log("performance")
    browser.get(page)
    assert browser.get_log("browser") == []
    assert {url.partition(":")[0] for url in requested(browser)} <= {"file", "data"}


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_wider_than_the_screen_and_every_figure_is_to_be_seen(browser, page, width):
    emulate(browser, width)
    browser.get(page)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    boxes = browser.execute_script("""
        return [...document.querySelectorAll('figure > svg')].map(svg => {
            const marks = [...svg.querySelectorAll('path, image, text, use')]
                .filter(mark => !mark.closest('defs')).map(mark => mark.getBoundingClientRect());
            const box = svg.getBoundingClientRect();
            const ink = svg.getBBox();
            const outside = marks.filter(m => m.right > box.right + 2 || m.left < box.left - 2).length;
            return [box.width, box.height, ink.width, ink.height, outside, marks.length];
        })""")
    assert len(boxes) == 10
    for box_width, box_height, ink_width, ink_height, outside, marks in boxes:
        assert min(box_width, box_height, ink_width, ink_height) > 100
        assert outside == 0
        assert marks > 10


def test_a_click_on_a_heading_sorts_by_number_and_a_second_one_the_other_way(browser, page):
    emulate(browser, 1280)
    browser.get(page)
    seed = browser.find_elements("css selector", "#runs thead button")[2]
    seed.click()
    assert column(browser, 2) == ["0", "0", "2", "2", "10", "10"]
    seed.click()
    assert column(browser, 2) == ["10", "10", "2", "2", "0", "0"]
    assert seed.find_element("xpath", "..").get_attribute("aria-sort") == "descending"


def test_the_keyboard_sorts_too(browser, page):
    from selenium.webdriver.common.keys import Keys

    emulate(browser, 1280)
    browser.get(page)
    arm = browser.find_elements("css selector", "#runs thead button")[0]
    arm.send_keys(Keys.ENTER)
    arm.send_keys(Keys.ENTER)
    assert column(browser, 0) == ["simbal"] * 3 + ["lbl"] * 3


def test_dark_mode_changes_the_page_and_the_lines_of_its_figures(browser, page):
    script = """return [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('figure text')).fill,
        [...document.querySelectorAll('#figure-loss path')].map(path => getComputedStyle(path).stroke).join()]"""
    seen = []
    for dark in (False, True):
        emulate(browser, 1280, dark)
        browser.get(page)
        seen.append(browser.execute_script(script))
    assert all(light != dark for light, dark in zip(*seen, strict=True))


def test_a_page_can_be_opened_where_its_name_has_odd_letters(browser, write_run, sweep, tmp_path):
    write_run()
    odd = Path(sweep).rename(tmp_path / "50% #1 ü")
    report(odd)
    browser.get((odd / "index.html").as_uri())
    href = browser.find_element("css selector", "#runs a").get_attribute("href")
    assert browser.title == odd.name
    browser.get(href)  # a folder, which the browser lists by a script
    wait_until(lambda: "config.yaml" in browser.page_source)
