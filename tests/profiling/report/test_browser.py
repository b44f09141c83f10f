"""The report in a real browser: charts are drawn, hovering and boxes work, keys do, and nothing is fetched or wrong."""

from __future__ import annotations

import pytest

from tests.page.browsing import charts_fit, needs_chromium, themes_differ
from tests.profiling.profiled import empty, hostile, profile
from tightfit.profiling.report.page import report

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("reports")
    (made / "two.html").write_text(report(profile(), profile(waiting=0.05, attention="sdpa", seed=1)))
    (made / "hostile.html").write_text(report(hostile()))
    (made / "empty.html").write_text(report(empty()))
    return made


def shown(page):
    """The words of the memory chart's curves that are visible."""
    return set(page.evaluate("document.getElementById('memory-chart').data.filter(t => t.visible !== false)"
                             ".map(t => t.meta)"))


@pytest.mark.parametrize(("width", "theme"), [(1200, "light"), (400, "dark"), pytest.param(
    1200, "dark", marks=pytest.mark.cold), pytest.param(400, "light", marks=pytest.mark.cold)])
def test_charts_are_drawn_and_fit(visit, width, theme):
    charts_fit(visit("two.html", width, theme), width, 9)


@pytest.mark.cold
def test_hovering_tells_bytes(visit):
    page = visit("two.html")
    plot = page.locator("#memory-chart .nsewdrag").first
    plot.scroll_into_view_if_needed()
    plot.hover()
    page.wait_for_selector("#memory-chart .hoverlayer .legend, #memory-chart .hoverlayer .hovertext")
    said = page.locator("#memory-chart .hoverlayer").text_content()
    assert "measured: weights" in said
    assert "KiB" in said


def test_nothing_offers_to_send_a_chart_away(visit):
    page = visit("two.html")
    offered = set(page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"))
    assert offered == {"Zoom", "Pan", "Zoom in", "Zoom out", "Autoscale", "Reset axes",
                       "Download plot as a PNG"}
    assert page.locator("form, a[href*='//']").count() == 0


@pytest.mark.cold
def test_boxes_hide_and_show_a_category(visit):
    page = visit("two.html")
    before = shown(page)
    assert {"measured activations", "predicted activations", "predicted all"} <= before
    page.locator("fieldset input[value=activations]").click()
    assert shown(page) == before - {"measured activations", "predicted activations"}
    page.locator("fieldset input[value=predicted]").click()
    assert all(word.startswith("measured") for word in shown(page))
    page.locator("fieldset input[value=predicted]").click()
    page.locator("fieldset input[value=activations]").click()
    assert shown(page) == before


@pytest.mark.cold
def test_the_keyboard_reaches_everything(visit):
    page = visit("two.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.value") == "temporary":
            break
    page.keyboard.press("Space")
    assert "measured temporary" not in shown(page)
    reached = set()
    for _ in range(400):
        page.keyboard.press("Tab")
        at = page.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.className || '')")
        if at == "BODY ":
            break
        reached.add(at)
    assert {"INPUT ", "DIV scroll", "SUMMARY "} <= reached


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.cold)])
def test_both_themes_and_the_button_between_them(visit, theme):
    themes_differ(visit("two.html", theme=theme), theme, "memory-chart")


@pytest.mark.cold
def test_a_folded_chart_takes_the_pages_width_when_it_opens(visit):
    page = visit("two.html")
    page.locator("#readings summary").click()
    page.wait_for_function("document.querySelector('#reading-0 .main-svg').getBoundingClientRect().width > 900")


def test_names_with_markup_stay_names(visit):
    page = visit("hostile.html")
    assert page.title() == "<script>alert(1)</script> on <script>alert(1)</script> - tightfit"
    labels = page.locator("#module-chart .ytick text").all_text_contents()
    assert "<script>alert(1)</script>" in labels
    assert '" onmouseover="alert(3)' in labels
    page.locator("#module-chart .nsewdrag").first.hover()
    page.wait_for_selector("#module-chart .hoverlayer .hovertext")
    assert page.locator("img").count() == 0
    assert page.locator("#module-chart a").count() == 0


def test_an_empty_profile_has_no_charts_and_no_errors(visit):
    page = visit("empty.html", drawn=False)
    page.wait_for_timeout(300)
    assert page.locator(".chart").count() == 0
    assert page.get_by_text("No allocations were recorded").is_visible()

