"""The page of `report` in a headless Chromium, on a desktop and on a phone."""

import shutil

import handmade_run
import pytest

from mpiparallel.__main__ import main

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SECTIONS = ["loss", "timeline", "step_time", "traffic", "matrix", "memory", "mesh"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run"
)

# Every piece of text that is drawn, with its box on the page: [text, left, top, right, bottom].
# Letters do not fill the height of their line, and boxes that touch do not overlap.
TEXTS = """
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, #vg-tooltip-element")) continue;
    if (!parent.checkVisibility({ opacityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
        found.push([node.data.trim(), box.left + 1, box.top + 2, box.right - 1, box.bottom - 2]);
}
return found;
"""

# Text of a chart that is outside of what its SVG shows.
CUT = """
return [...document.querySelectorAll("svg text")].filter(text => {
    const box = text.getBoundingClientRect();
    const frame = text.ownerSVGElement.getBoundingClientRect();
    return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
}).map(text => text.textContent);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Chromium and its driver of this machine, and an empty profile. Nothing is downloaded."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("no Chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The address of a report."""
    folder = tmp_path_factory.mktemp("report") / "run"
    handmade_run.write(folder)
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").as_uri()


@pytest.fixture(params=[1200, 390], ids=["desktop", "phone"])
def shown(browser, page, request):
    """The browser with the report in it, all charts drawn, at a width in pixels."""
    screen = {"width": request.param, "height": 900, "deviceScaleFactor": 1}
    screen["mobile"] = request.param < 500
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page)
    WebDriverWait(browser, 20).until(
        lambda _: len(browser.find_elements(By.CSS_SELECTOR, ".chart svg")) == len(SECTIONS)
    )
    return browser


def test_the_console_has_no_complaint_and_nothing_is_loaded(shown):
    assert shown.get_log("browser") == []
    assert shown.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_every_section_is_visible_and_has_its_chart(shown):
    sections = shown.find_elements(By.TAG_NAME, "section")
    assert [section.get_attribute("id") for section in sections] == SECTIONS
    for section in sections:
        assert section.is_displayed()
        chart = section.find_element(By.TAG_NAME, "svg")
        assert chart.is_displayed()
        assert chart.size["width"] >= 250
        assert chart.size["height"] >= 100
        assert chart.find_elements(By.CSS_SELECTOR, ".mark-rect path, .mark-line path")


def test_no_text_overlaps_another_or_is_cut(shown):
    texts = shown.execute_script(TEXTS)
    assert len(texts) > 100
    for index, (text, left, top, right, bottom) in enumerate(texts):
        for other, its_left, its_top, its_right, its_bottom in texts[:index]:
            across = min(right, its_right) > max(left, its_left)
            down = min(bottom, its_bottom) > max(top, its_top)
            assert not (across and down), f"{text!r} and {other!r} overlap"
    assert shown.execute_script(CUT) == []


def test_the_page_is_not_wider_than_the_screen(shown):
    wide, screen = shown.execute_script(
        "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
    )
    assert wide <= screen


def test_hovering_over_an_action_shows_its_numbers(shown):
    bars = shown.find_elements(By.CSS_SELECTOR, "#timeline .mark-rect path")
    forward = next(
        bar for bar in bars if "F stage 0 mb 1" in (bar.get_attribute("aria-label") or "")
    )
    shown.execute_script("arguments[0].scrollIntoView({block: 'center'})", forward)
    ActionChains(shown).move_to_element(forward).perform()
    WebDriverWait(shown, 10).until(
        lambda _: shown.find_element(By.ID, "vg-tooltip-element").is_displayed()
    )
    text = " ".join(shown.find_element(By.ID, "vg-tooltip-element").text.split())
    for part in ("rank 0", "F stage 0 mb 1", "step 7", "stage 0", "micro-batch 1", "10.0 ms"):
        assert part in text
