"""The page in headless Chromium; skipped where there is none."""

import json
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

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


def column(browser, place: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#runs tbody tr')].map(r => r.cells[arguments[0]].textContent.trim())"
    )
    return browser.execute_script(script, place)


def requested(browser) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def values(browser, name: str) -> list[str]:
    """What the legend of a figure says at the pointer."""
    return [each.text for each in browser.find_elements("css selector", f"#figure-{name} .legend output")]


def reach(browser, name: str) -> list[float]:
    """The scales of a figure: the ends of x and of y."""
    return browser.execute_script(
        """const { scales } = views.find(view => view.chart.name === arguments[0]).plot;
        return [scales.x.min, scales.x.max, scales.y.min, scales.y.max]""",
        name,
    )


def drag(browser, name: str) -> None:
    """Drag over the middle of a figure."""
    from selenium.webdriver import ActionChains

    over = browser.find_element("css selector", f"#figure-{name} .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    start = ActionChains(browser).move_to_element_with_offset(over, -80, -40)
    start.click_and_hold().move_by_offset(120, 80).release().perform()


def test_it_loads_without_a_word_of_complaint_and_without_a_network(browser, page):
    browser.get_log("performance")
    browser.get(page)
    assert browser.get_log("browser") == []
    assert {url.partition(":")[0] for url in requested(browser)} <= {"file", "data"}


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("scripts", [True, False])
def test_nothing_is_wider_than_the_screen_and_every_figure_is_to_be_seen(browser, page, width, scripts):
    emulate(browser, width)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    browser.get(page)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    boxes = browser.execute_script("""
        return [...document.querySelectorAll('figure:not(.drawn) > svg')].map(svg => {
            const marks = [...svg.querySelectorAll('path, image, text, use')]
                .filter(mark => !mark.closest('defs')).map(mark => mark.getBoundingClientRect());
            const box = svg.getBoundingClientRect();
            const ink = svg.getBBox();
            const outside = marks.filter(m => m.right > box.right + 2 || m.left < box.left - 2).length;
            return [box.width, box.height, ink.width, ink.height, outside, marks.length];
        })""")
    drawn = browser.find_elements("css selector", "figure.drawn canvas")
    assert (len(boxes), len(drawn)) == ((1, 10) if scripts else (11, 0))
    assert all(min(canvas.rect["width"], canvas.rect["height"]) > 100 for canvas in drawn)
    assert all(canvas.rect["x"] + canvas.rect["width"] <= width for canvas in drawn)
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
        [...document.querySelectorAll('#figure-loss path')].map(path => getComputedStyle(path).stroke).join(),
        views[0].plot.series[1].stroke()]"""
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


def test_the_pointer_reads_values_and_a_click_on_a_name_hides_its_arm_everywhere(browser, page):
    from selenium.webdriver import ActionChains

    emulate(browser, 1280)
    browser.get(page)
    over = browser.find_element("css selector", "#figure-loss .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    ActionChains(browser).move_to_element(over).perform()
    wait_until(lambda: values(browser, "loss") == ["10", "10"])  # 8 - 20 / 10 + the mean of seeds 0, 2 and 10
    assert browser.find_element("css selector", "#figure-loss .readout").text.startswith("at 200")
    browser.find_element("css selector", "#figure-loss .name").click()
    shown = "return views.map(view => view.plot.series[1].show)"
    assert set(browser.execute_script(shown)) == {False}


def test_single_seeds_are_lines_of_their_own_when_they_are_asked_for(browser, page):
    emulate(browser, 1280)
    browser.get(page)
    labels = "return views[0].plot.series.map(line => line.label).filter(label => label && label.includes('seed='))"
    assert browser.execute_script(labels) == []
    seeds = browser.find_elements("css selector", ".controls button")
    assert [seed.text for seed in seeds] == ["all", "0", "2", "10"]
    seeds[3].click()
    assert browser.execute_script(labels) == ["lbl seed=10", "simbal seed=10"]
    seeds[0].click()
    assert len(browser.execute_script(labels)) == 6


def test_a_figure_zooms_and_takes_a_logarithmic_scale_and_a_reload_keeps_both_and_the_place(browser, page):
    emulate(browser, 1280)
    browser.get(page)
    whole = reach(browser, "loss")
    drag(browser, "loss")
    zoomed = reach(browser, "loss")
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    assert whole[2] < zoomed[2] < zoomed[3] < whole[3]
    log_y = browser.find_elements("css selector", "#figure-max-vio .tools button")[1]
    log_y.click()
    distribution = "return views.find(view => view.chart.name === 'max-vio').plot.scales.y.distr"
    assert browser.execute_script(distribution) == 3
    at = browser.execute_script("return scrollY")
    wait_until(lambda: browser.execute_script("return history.state.scroll") == at)
    browser.refresh()
    assert reach(browser, "loss") == pytest.approx(zoomed)
    assert browser.execute_script(distribution) == 3
    assert browser.execute_script("return scrollY") == pytest.approx(at, abs=2)
    whole_button = browser.find_elements("css selector", "#figure-loss .tools button")[2]
    whole_button.click()
    assert reach(browser, "loss") == pytest.approx(whole)


def test_on_paper_the_static_figures_are_shown(browser, page):
    browser.get(page)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    display = "return getComputedStyle(document.querySelector(arguments[0])).display"
    assert browser.execute_script(display, "#figure-loss > svg") == "block"
    assert browser.execute_script(display, "#figure-loss .chart") == "none"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_page_of_a_running_sweep_follows_it_by_itself_and_becomes_its_table(browser, tmp_path):
    """Nobody reloads anything; what was chosen, and the place in the page, stay."""
    command = small_sweep.command(
        tmp_path / "outputs", tmp_path / "cache", "trainer.max_steps=160", "trainer.val_every=8"
    )
    emulate(browser, 1280)
    browser.get_log("browser")  # what pages of other tests have said
    steps = "return Number(document.querySelector('progress').value)"
    file = tmp_path / "outputs/default/index.html"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as sweep:
        try:
            wait_until(file.exists)
            browser.get(file.as_uri())
            wait_until(lambda: browser.execute_script("return document.querySelectorAll('canvas').length") >= 4)
            browser.find_elements("css selector", "#figure-max-vio .tools button")[1].click()
            browser.execute_script("scrollTo(0, 300)")
            first = browser.execute_script(steps)
            wait_until(lambda: browser.execute_script(steps) > first)
            assert browser.execute_script("return scrollY") == pytest.approx(300, abs=2)
            pressed = (
                "return document.querySelectorAll('#figure-max-vio .tools button')[1].getAttribute('aria-pressed')"
            )
            assert browser.execute_script(pressed) == "true"
            assert browser.get_log("browser") == []
            assert sweep.wait(300) == 0
        finally:
            sweep.kill()
    wait_until(lambda: browser.find_elements("css selector", "#results"))
    assert not browser.find_elements("css selector", "#live, [http-equiv=refresh]")
