"""The page in headless Chromium; skipped if it is not installed."""

import json
import shutil
import warnings
from collections.abc import Iterator

import pytest

from simbal.report.report import report
from tests.child_processes import wait_until
from tests.report.page.conftest import HOSTILE, write_hostile

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
def page(write_run, analyze, sweep):
    """The address of a page with every section, long names and errors."""
    for balancing in ("lbl", "simbal"):
        for seed in (0, 2, 10):
            metrics = {"val/ppl": 50.0 + seed, "val/bpb": 2.0 - (balancing == "lbl") * (1 + seed / 100)}
            analyze(write_run(balancing, seed, keys={"data.cache_dir": "x"}, metrics=metrics))
    write_run("simbal", 3, status="failed", error="a long error " * 20 + "without_a_space" * 30)
    (sweep / "sweep.json").write_text(json.dumps({"command": f"train.py {'x' * 300}", "runs": {"never-1": "seed=99"}}))
    report(sweep)
    return (sweep / "index.html").as_uri()


def open_page(browser, address: str, width: int, dark: bool = False) -> None:
    """Open a page and check that its figures are drawn without errors or network, and that it fits the width."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    for log in ("browser", "performance"):
        browser.get_log(log)  # messages of other pages
    browser.get(address)
    wait_until(lambda: browser.execute_script("return document.documentElement.dataset.drawn"))
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in requests} <= {"file", "data"}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def lines_of_loss(browser) -> int:
    return len(browser.find_elements("css selector", "[data-figure=loss] .mark-line path"))


def test_a_page_works_on_a_desktop_and_on_a_phone_in_light_and_dark(browser, page):
    desktop_draws_figures_hides_an_arm_changes_scales_and_sorts(browser, page)
    for dark in (False, True):
        phone_shows_every_interval_with_its_conclusion(browser, page, dark)


def desktop_draws_figures_hides_an_arm_changes_scales_and_sorts(browser, page):
    open_page(browser, page, 1280)
    figures = browser.find_elements("css selector", "[data-figure]")
    assert len(figures) == len(browser.find_elements("css selector", "[data-figure] svg")) >= 11
    assert lines_of_loss(browser) == 2
    browser.find_element("css selector", "[data-arm=simbal]").click()
    wait_until(lambda: lines_of_loss(browser) == 1)
    browser.find_element("css selector", "[data-show=seeds]").click()
    wait_until(lambda: lines_of_loss(browser) == 1 + 3)
    browser.refresh()  # as a running sweep's page does
    wait_until(lambda: lines_of_loss(browser) == 1 + 3)
    for axis in ("x", "y"):
        before = browser.find_element("css selector", "[data-figure=loss]").get_attribute("innerHTML")
        browser.find_element("css selector", f"figure:has([data-figure=loss]) [data-scale={axis}]").click()
        wait_until(lambda before=before: before not in browser.page_source and lines_of_loss(browser) == 1 + 3)
    heading = browser.find_elements("css selector", "#results thead button")[0]
    heading.click()
    heading.click()
    assert heading.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
    assert browser.get_log("browser") == []


def phone_shows_every_interval_with_its_conclusion(browser, page, dark):
    open_page(browser, page, 375, dark)
    complete = """return [...document.querySelectorAll("[data-figure^=difference] .mark-rect path")].map((bar) => {
        const [outer, inner] = [bar.closest("svg"), bar].map((element) => element.getBoundingClientRect());
        return inner.width > 1 && outer.left <= inner.left && inner.right <= outer.right && outer.right <= innerWidth;
    })"""
    found = browser.execute_script(complete)
    assert len(found) >= 1
    assert all(found)
    texts = [each.text for each in browser.find_elements("css selector", "[data-figure=difference-val-bpb] text")]
    assert any("worse" in text for text in texts)
    assert "simbal" in texts


def test_hostile_texts_stay_texts_in_the_browser(browser, write_run, sweep):
    write_hostile(write_run, sweep, " ".join(HOSTILE))
    report(sweep)
    open_page(browser, (sweep / "index.html").as_uri(), 1280)
    assert "<script>alert(1)" in browser.find_element("css selector", "[data-figure=difference-val-ppl]").text
    assert "note=<script>" in browser.find_element("css selector", ".controls").text
