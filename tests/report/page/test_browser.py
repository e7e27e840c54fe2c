"""The page in headless Chromium; skipped where there is none."""

import json
import shutil
import subprocess
import warnings
from collections.abc import Iterator

import pytest

from simbal.report.report import report
from tests.child_processes import wait_until
from tests.report.page.conftest import HOSTILE, write_hostile
from tests.sweep import small_sweep

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
def page(write_run, analyse, sweep):
    """The address of a page with all that a page can have, long names among it."""
    for balancing in ("lbl", "simbal"):
        for seed in (0, 2, 10):
            metrics = {"val/ppl": 50.0 + seed, "val/bpb": 2.0 - (balancing == "lbl") * (1 + seed / 100)}
            analyse(write_run(balancing, seed, keys={"data.cache_dir": "x"}, metrics=metrics))
    write_run("simbal", 3, status="failed", error="a long error " * 20 + "without_a_space" * 30)
    (sweep / "sweep.json").write_text(json.dumps({"command": f"train.py {'x' * 300}", "runs": {"never-1": "seed=99"}}))
    report(sweep)
    return (sweep / "index.html").as_uri()


def emulate(browser, width: int, dark: bool = False) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def requested(browser) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def open_page(browser, address: str, width: int, dark: bool = False) -> None:
    """Open a page and wait until its figures are drawn, without an error, within its width and without the network."""
    emulate(browser, width, dark)
    for log in ("browser", "performance"):
        browser.get_log(log)  # what other pages have said
    browser.get(address)
    wait_until(lambda: browser.execute_script("return document.documentElement.dataset.drawn"))
    assert browser.get_log("browser") == []
    assert {url.partition(":")[0] for url in requested(browser)} <= {"file", "data"}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def lines_of_loss(browser) -> int:
    return len(browser.find_elements("css selector", "[data-figure=loss] .mark-line path"))


def test_a_finished_page_draws_its_figures_hides_an_arm_changes_scales_and_sorts(browser, page):
    open_page(browser, page, 1280)
    figures = browser.find_elements("css selector", "[data-figure]")
    assert len(figures) == len(browser.find_elements("css selector", "[data-figure] svg")) >= 11
    assert lines_of_loss(browser) == 2
    browser.find_element("css selector", "[data-arm=simbal]").click()
    wait_until(lambda: lines_of_loss(browser) == 1)
    browser.find_element("css selector", "[data-show=seeds]").click()
    wait_until(lambda: lines_of_loss(browser) == 1 + 3)
    browser.refresh()  # as the page of a running sweep does
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


@pytest.mark.parametrize("dark", [False, True])
def test_a_telephone_shows_every_interval_in_full_with_its_conclusion(browser, page, dark):
    open_page(browser, page, 375, dark)
    whole = """return [...document.querySelectorAll("[data-figure^=difference] .mark-rect path")].map((bar) => {
        const [outer, inner] = [bar.closest("svg"), bar].map((element) => element.getBoundingClientRect());
        return inner.width > 1 && outer.left <= inner.left && inner.right <= outer.right && outer.right <= innerWidth;
    })"""
    found = browser.execute_script(whole)
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


def test_the_page_of_a_running_sweep_becomes_its_table(browser, tmp_path):
    command = small_sweep.command(tmp_path / "outputs", tmp_path / "cache", "hydra.launcher.n_jobs=1")
    file = tmp_path / "outputs/default/index.html"
    browser.get_log("browser")  # what pages of other tests have said
    refresh = ("css selector", "[http-equiv=refresh]")
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as sweep:
        try:
            wait_until(file.exists)
            browser.get(file.as_uri())
            assert browser.find_elements(*refresh)
            assert browser.find_elements("css selector", "[data-figure]")
            assert sweep.wait(300) == 0
        finally:
            sweep.kill()
    browser.get(file.as_uri())
    assert not browser.find_elements(*refresh)
    assert browser.get_log("browser") == []
