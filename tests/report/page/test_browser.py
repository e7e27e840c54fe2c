"""The page in headless Chromium; skipped where there is none."""

import json
import shutil
import subprocess
import warnings
from collections.abc import Iterator

import pytest

from simbal.report.report import report
from tests.child_processes import wait_until
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


def requested(browser) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_a_finished_page_draws_its_curves_sorts_and_asks_for_nothing(browser, page):
    emulate(browser, 1280)
    browser.get_log("performance")
    browser.get(page)
    assert browser.get_log("browser") == []
    assert {url.partition(":")[0] for url in requested(browser)} <= {"file", "data"}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1280
    assert len(browser.find_elements("css selector", "figure.drawn canvas")) == 9
    browser.find_element("css selector", "#figure-loss .name").click()
    assert set(browser.execute_script("return views.map(view => view.plot.series[1].show)")) == {False}
    heading = browser.find_elements("css selector", "#results thead button")[0]
    heading.click()
    heading.click()
    assert heading.find_element("xpath", "..").get_attribute("aria-sort") == "descending"


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
            assert browser.find_elements("css selector", "#figure-loss canvas")
            assert sweep.wait(300) == 0
        finally:
            sweep.kill()
    browser.get(file.as_uri())
    assert not browser.find_elements(*refresh)
    assert browser.get_log("browser") == []
