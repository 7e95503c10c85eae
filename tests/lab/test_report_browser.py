"""The report in headless Chromium renders, logs no error, and its controls do what they say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.report import write_report
from tests.lab.report_runs import falling, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if not CHROMIUM or not DRIVER:
    pytest.skip("no Chromium with its driver here: apt-get install chromium chromium-driver", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1280,1000",
)
KINDS = ["q", "k", "v", "o", "gate", "up", "down"]
EVIL = "</script><script>document.title='broken'</script><b>"
ROOT = "document.documentElement"
LINES = "[data-axis={axis}] path.curve.val"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report on two optimizers, two rates, two seeds, diagnostics, a diverged run and a hostile name."""
    runs = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        make_run(runs / f"c{seed}", "cosmos", falling(2.0 + 0.1 * seed), seed=seed, layers=3)
    make_run(runs / "c2", "cosmos", falling(2.5), lr=2e-3, layers=3)
    make_run(runs / "a1", "adam", falling(2.4), name=EVIL)
    make_run(runs / "a2", "adam", [3.0, 4.0, None], lr=2e-3)
    (runs / "empty").mkdir()
    monkey = pytest.MonkeyPatch()
    monkey.setattr("cosmos_lab.report._figures", lambda specs, folder: None)  # tested without a browser
    written = write_report([runs], tmp_path_factory.mktemp("out"), title=f"Report {EVIL}").page
    monkey.undo()
    return written


@pytest.fixture
def shown(browser: Any, page: Path) -> Iterator[Any]:
    """Load the page; afterwards the browser must not have logged a complaint."""
    browser.get_log("browser")
    browser.get(page.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []


def css(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def press(browser: Any, selector: str) -> None:
    """Press a control with the keyboard, as a reader without a mouse would."""
    (control,) = css(browser, selector)
    browser.execute_script("arguments[0].focus()", control)
    control.send_keys(" ")


def test_the_page_renders_and_fetches_nothing(shown: Any) -> None:
    assert shown.find_element("css selector", "html").get_attribute("data-ready") == "true"
    assert shown.title == f"Report {EVIL}"
    assert "Of 2 optimizers, each at the best rate tried, cosmos ended lowest" in css(shown, ".lead")[0].text
    for axis in ("tokens", "time"):
        lines = css(shown, LINES.format(axis=axis))
        assert len(lines) == 2  # the best rate of each optimizer
        assert all(line.is_displayed() and line.size["width"] > 100 for line in lines)
        assert len(css(shown, f"[data-axis={axis}] path.curve.train")) == 3  # one per seed
        assert len(css(shown, f"[data-axis={axis}] path.band")) == 1  # two seeds have a spread
    assert len(css(shown, ".sweep .mark")) == 4
    assert len(css(shown, ".sweep .mark.failed")) == 1
    assert "no result" in [text.text for text in css(shown, ".sweep .axes text")]  # the run may be unfinished
    assert len(css(shown, ".heat canvas")) == 7
    assert "empty" in css(shown, "#not-shown")[0].text
    requested = [entry["message"] for entry in shown.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert requested and not [message for message in requested if '"url":"http' in message]


def test_series_are_switched_by_mouse_and_keyboard(shown: Any) -> None:
    first = LINES.format(axis="tokens")
    chip = css(shown, ".chip.rate[data-series='0']")[0]
    assert chip.get_attribute("aria-pressed") == "true"
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert [len(css(shown, LINES.format(axis=axis))) for axis in ("tokens", "time")] == [1, 1]
    press(shown, ".chip.rate[data-series='0']")
    assert len(css(shown, first)) == 2
    press(shown, ".chip.rate[data-series='1']")
    assert len(css(shown, first)) == 3
    for link, expected in (("None", 0), ("All", 4), ("Best rates", 2)):
        (button,) = [found for found in css(shown, ".quick button") if found.text == link]
        button.click()
        assert len(css(shown, first)) == expected
    css(shown, ".chip.head")[0].click()
    assert len(css(shown, first)) == 1


def test_axes_switch_between_linear_and_log(shown: Any) -> None:
    def drawn() -> list[str]:
        return [line.get_attribute("d") for line in css(shown, LINES.format(axis="tokens"))]

    linear = drawn()
    press(shown, "[data-chart=curves] fieldset:nth-of-type(1) input[value=log]")
    log = drawn()
    press(shown, "[data-chart=curves] fieldset:nth-of-type(2) input[value=log]")
    assert len({tuple(linear), tuple(log), tuple(drawn())}) == 3
    assert not any("NaN" in path for path in drawn())
    css(shown, "[data-chart=curves] .toggle")[0].click()
    assert not css(shown, "path.curve.train")


def test_a_chart_reads_out_values_under_pointer_and_keys(shown: Any) -> None:
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")
    (tip,) = css(shown, "[data-axis=tokens] .tip")
    assert not tip.is_displayed()
    webdriver.ActionChains(shown).move_to_element(chart).perform()
    assert "tokens" in tip.text and "cosmos 1e-3" in tip.text
    shown.execute_script("arguments[0].focus()", chart)
    chart.send_keys(webdriver.Keys.END)
    assert tip.text.startswith("60 k tokens")
    assert "2.050 ± 0.071" in tip.text  # the mean of 2.0 and 2.1, and their standard deviation
    chart.send_keys(webdriver.Keys.ARROW_LEFT)
    assert tip.text.startswith("50 k tokens")


def test_dragging_zooms_and_a_button_resets(shown: Any) -> None:
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")
    (reset,) = [
        button for button in css(shown, "[data-chart=curves] button") if "Reset" in button.get_attribute("textContent")
    ]
    before = css(shown, "[data-axis=tokens] .axes")[0].text
    assert not reset.is_displayed()
    webdriver.ActionChains(shown).move_to_element(chart).click_and_hold().move_by_offset(90, 0).release().perform()
    assert css(shown, "[data-axis=tokens] .axes")[0].text != before
    reset.click()
    assert css(shown, "[data-axis=tokens] .axes")[0].text == before


def test_the_numbers_on_the_axes_of_a_zoomed_chart_are_those_of_its_ticks(shown: Any) -> None:
    """Rounded to few digits, the ticks of a narrow range would all have the same number."""
    script = """
      const [axes] = document.querySelectorAll("[data-axis=tokens] .axes"), end = (x) => x.baseVal.value;
      const texts = [...axes.querySelectorAll("text")].map((text) => text.textContent);
      const at = [...axes.querySelectorAll("line.tick")].map((line) => end(line.x1));
      return [texts.filter((text) => text.endsWith(" k")).map(parseFloat), at]"""
    for _ in range(3):
        (chart,) = css(shown, "[data-axis=tokens] .chart svg")
        webdriver.ActionChains(shown).move_to_element(chart).click_and_hold().move_by_offset(20, 0).release().perform()
        numbers, places = shown.execute_script(script)
        assert len(numbers) == len(places) >= 3
        steps = [(b - a) / (q - p) for (a, b), (p, q) in zip(pairwise(numbers), pairwise(places), strict=True)]
        assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3) and steps[0] > 0


@pytest.mark.parametrize(("scale", "begin"), [("linear", -60), ("log", -190)])
def test_labels_sit_where_their_lines_leave_a_zoomed_chart(shown: Any, scale: str, begin: int) -> None:
    for choice in css(shown, f"[data-chart=curves] input[value={scale}]"):
        shown.execute_script("arguments[0].click()", choice)
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")
    webdriver.ActionChains(shown).move_to_element_with_offset(chart, begin, 0).click_and_hold().move_by_offset(
        75, 0
    ).release().perform()
    script = """return [...document.querySelectorAll("[data-axis=tokens] .end")].map((end) => {
      const leader = end.querySelector("path"), start = leader.getPointAtLength(0);
      const colour = (element) => element.style.getPropertyValue("--light");
      const lines = [...document.querySelectorAll("[data-axis=tokens] path.curve.val")];
      const own = lines.find((line) => colour(line) === colour(end));
      let least = Infinity;
      for (let i = 0; i <= 2000; i++) {
        const p = own.getPointAtLength((i / 2000) * own.getTotalLength());
        least = Math.min(least, Math.hypot(p.x - start.x + 3, p.y - start.y));
      }
      return [least, leader.getPointAtLength(leader.getTotalLength()).x - start.x];
    })"""
    distances = shown.execute_script(script)
    assert len(distances) == 2
    for from_line, from_edge in distances:  # in pixels: on the line, where the line leaves the chart
        assert from_line < 3 and from_edge < 8


def test_a_zoomed_chart_reads_only_points_inside_it(shown: Any) -> None:
    """A point outside would draw its line across the page."""
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")
    webdriver.ActionChains(shown).move_to_element(chart).click_and_hold().move_by_offset(20, 0).release().perform()
    script = """
      const find = (name) => document.querySelector(`[data-axis=tokens] .${name}`), end = (x) => x.baseVal.value;
      const axis = find("base"), cursor = find("cursor line");
      return !cursor || (end(axis.x1) <= end(cursor.x1) && end(cursor.x1) <= end(axis.x2))"""
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")  # drawn again
    webdriver.ActionChains(shown).move_to_element(chart).perform()
    assert shown.execute_script(script)
    shown.execute_script("arguments[0].focus()", chart)
    for key in (webdriver.Keys.HOME, webdriver.Keys.END):
        chart.send_keys(key)
        assert shown.execute_script(script)


def test_a_click_on_a_chart_keeps_the_focus_for_the_arrow_keys(shown: Any) -> None:
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")
    chart.click()
    shown.switch_to.active_element.send_keys(webdriver.Keys.END)
    assert css(shown, "[data-axis=tokens] .tip")[0].text.startswith("60 k tokens")


def test_a_zoomed_chart_keeps_the_focus_for_the_arrow_keys(shown: Any) -> None:
    (chart,) = css(shown, "[data-axis=tokens] .chart svg")
    webdriver.ActionChains(shown).move_to_element(chart).click_and_hold().move_by_offset(90, 0).release().perform()
    shown.switch_to.active_element.send_keys(webdriver.Keys.HOME)
    assert css(shown, "[data-axis=tokens] .tip")[0].text.startswith("40 k tokens")


def test_dots_lie_on_their_lines_or_are_not_drawn(shown: Any) -> None:
    script = """return [...document.querySelectorAll("[data-axis=tokens] .mark.dot")].filter((mark) => {
      const [x, y] = mark.getAttribute("transform").match(/-?[0-9.]+/g).map(Number);
      const lines = [...document.querySelectorAll("[data-axis=tokens] path.curve.val")];
      const points = lines.flatMap((line) => line.getAttribute("d").slice(1).split("L"));
      const places = points.map((point) => point.split(",").map(Number));
      return !places.some(([px, py]) => Math.hypot(px - x, py - y) < 0.2);
    }).length"""
    assert css(shown, "[data-axis=tokens] .mark.dot") and shown.execute_script(script) == 0


def test_the_heat_map_shows_the_chosen_metric_and_run(shown: Any) -> None:
    def pixels() -> tuple[str, ...]:
        script = "return [...document.querySelectorAll('.heat canvas')].map((canvas) => canvas.toDataURL())"
        return tuple(shown.execute_script(script))

    seen = {pixels()}
    for metric in ("drift", "update_rms", "ratio"):
        press(shown, f"[data-chart=heat] input[value={metric}]")
        assert css(shown, ".heat")[0].get_attribute("data-metric") == metric
        seen.add(pixels())
    assert len(seen) == 4
    assert [figure.text.split()[0] for figure in css(shown, ".heat figcaption")] == KINDS
    assert len(css(shown, "[data-chart=heat] option")) == 3
    webdriver.ActionChains(shown).move_to_element(css(shown, ".heat .frame")[0]).perform()
    assert "blocks.1.attn.q.weight" in css(shown, ".heat .tip")[0].text


def test_tables_sort_and_the_scheme_changes(shown: Any) -> None:
    def order() -> list[str]:
        return [cell.text.split()[0] for cell in css(shown, "table.all tbody td:nth-child(3)")]

    (button,) = [found for found in css(shown, "table.all th button") if found.text == "Learning rate"]
    for expected in (["1e-3", "1e-3", "2e-3", "2e-3"], ["2e-3", "2e-3", "1e-3", "1e-3"]):
        button.click()
        assert order() == expected
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = shown.execute_script(colour)
    css(shown, "#theme")[0].click()
    assert shown.execute_script(colour) != light


@pytest.mark.parametrize("width", [360, 1600])
def test_no_sideways_scrolling_at_any_width(shown: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        shown.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")  # drawn again
        wide, window = shown.execute_script(f"const page = {ROOT}; return [page.scrollWidth, page.clientWidth]")
        assert wide <= window <= width
        assert all(chart.size["width"] < window for chart in css(shown, ".chart svg"))
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
