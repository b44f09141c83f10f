"""Pages in a real browser, in which nothing may go wrong and of which nothing may ask a network."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
DRAWN = "document.querySelectorAll('.chart').length && [...document.querySelectorAll('.chart')]" \
        ".every(c => c.querySelector('.main-svg'))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"), executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield context
        context.close()


@pytest.fixture
def visit(browser, folder):
    """A function that opens a page of the module's `folder` by its name; in the end nothing may have gone wrong."""
    page = browser.new_page()
    wrong, asked = [], []
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))

    def go(name, width=1200, theme="light", drawn=True):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        page.goto((folder / name).as_uri())
        if drawn:
            page.wait_for_function(DRAWN)
        return page

    yield go
    page.close()
    assert wrong == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)


def charts_fit(page, width, at_least):
    """That the charts in sight are drawn, lie within the page, and leave room to draw in."""
    charts = page.locator(".chart:visible")
    assert charts.count() >= at_least
    for at in range(charts.count()):
        chart = charts.nth(at)
        box = chart.locator(".main-svg").first.bounding_box()
        assert box["width"] > 300
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert chart.locator(".scatterlayer path, .barlayer path").count() > 0
        assert chart.locator(".nsewdrag").first.bounding_box()["width"] > 0.25 * width  # labels leave room to draw in
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def themes_differ(page, theme, chart):
    """That text can be read in the theme that the system asks for, and in the other one behind the button."""
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, " \
              f"getComputedStyle(document.querySelector('#{chart} .xtick text')).fill]"

    def lightness(colour):
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    for name in (theme, "dark" if theme == "light" else "light"):
        back, ink, ticks = map(lightness, page.evaluate(colours))
        assert (back < 200) == (name == "dark")
        assert abs(back - ink) > 500
        assert abs(back - ticks) > 500
        page.locator("#theme").click()
        page.wait_for_timeout(300)
