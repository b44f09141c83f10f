"""A ladder's page: every figure with a table beside it, nothing fetched, no name become markup."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.ladder.made import CARD, EVIL, EVILS, PEER, bert_large, empty, hostile, predicted
from tests.page.browsing import charts_fit, needs_chromium
from tests.page.pages import Read, stands_alone
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.charts import draw
from tightfit.ladder.page import page


@pytest.fixture(scope="module")
def reduced():
    return page(bert_large())


def shown(run):
    """The charts by name: who says what of which device."""
    return {chart.name: [trace.name for trace in chart.figure.data] for chart in draw(run)}


def test_all_of_it_is_there(reduced):
    read = Read(reduced)
    for name in ("ladder", "seconds", "memory", "full-seconds", "throughput", "features", "peers", "about"):
        assert name in read.ids
    for word in ("13 of 15", "published (publ.) on V100 16 GB", "reduced shape", "-50.0 %",
                 "predicted, v100-16gb", "predicted differs from measured by", f"speed, {PEER}",
                 "Pareto front", "DeepSpeed ZeRO", "not measured", "0.67x", "too new",
                 "not the same work", "at full size: does not fit", "abc1234",
                 "2026-11-21 10:00", "16.0 GiB", "micro_batch_size: 1", "3 of 3"):
        assert word in read.said, word


def test_it_stands_alone_and_can_be_read_without_eyes(reduced):
    stands_alone(reduced)
    read = Read(reduced)
    assert len(read.ids) == len(set(read.ids))
    links = [attributes["href"] for tag, attributes in read.tags if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= set(read.ids)
    labels = [attributes["aria-label"] for tag, attributes in read.tags if attributes.get("role") == "img"]
    assert len(labels) == 5
    assert all("The table below holds it." in label for label in labels)
    assert all(attributes["scope"] in ("row", "col") for tag, attributes in read.tags if tag == "th")


def test_published_figures_stand_beside_measured_ones_at_full_size_alone():
    reduced = shown(bert_large())
    assert reduced["seconds"] == ["measured, CPU", "predicted, CPU"]
    assert reduced["full-seconds"] == ["published, V100 16 GB", "predicted, v100-16gb"]
    run = bert_large("full", CARD, gpu=None)
    full = shown(run)
    assert full["seconds"] == full["memory"] == [
        "published, V100 16 GB", "measured, V100 16 GB", "predicted, V100 16 GB"]
    assert "full-seconds" not in full
    memory = next(chart for chart in draw(run) if chart.name == "memory")
    refused = next(row for row in memory.rows if row[0].startswith("13."))
    assert refused[1:3] == ("-", "-")  # what did not run took nothing, its context left aside
    assert "measured differs from published by" in Read(page(run)).said


def test_only_what_is_of_the_same_card_is_compared(reduced):
    assert "predicted differs from published by" in Read(reduced).said
    other = Read(page(bert_large(gpu="rtx-4090"))).said
    assert "predicted, rtx-4090" in other
    assert "published, V100 16 GB" in other
    assert "predicted differs from published by" not in other
    assert "predicted for RTX 4090, another card than that of publ." in other
    h200 = Read(page(bert_large("full", CARD.model_copy(update={"device": "NVIDIA H200"}), gpu=None))).said
    assert "measured differs from published by" not in h200
    assert "predicted differs from measured by" in h200


def test_a_card_that_was_not_named_is_compared_with_none():
    run = empty(ladders()["fp16-batch"], "reduced", gpu="titan-rtx")
    run.rows.predicted += [predicted(run, rung, "titan-rtx", "full", 0.5, 8_000) for rung in run.ladder.rungs]
    said = Read(page(run)).said
    assert "predicted, titan-rtx" in said
    assert "predicted differs from published by" not in said
    assert "another card" not in said


def test_charts_hold_every_rung_with_a_figure():
    run = bert_large()
    charts = {chart.name: chart for chart in draw(run)}
    assert [row[0].partition(".")[0] for row in charts["memory"].rows] == [str(n) for n in range(1, 15)]
    assert len(charts["full-seconds"].figure.data[0].y) == 14
    assert [len(trace.x) for trace in charts["throughput"].figure.data] == [13, 0, 10]  # on the front, others, peers
    ddp = empty(ladders()["ddp"], "full", CARD, gpu="v100-16gb")
    assert shown(ddp) == {"seconds": ["published, two TITAN RTX with NVLink"],
                          "full-seconds": ["published, two TITAN RTX with NVLink"]}
    assert draw(ddp)[0].rows[0][1] == "0.55"


def test_names_stay_names():
    markup = page(hostile())
    read = Read(markup)
    assert EVIL in read.said
    assert not {tag for tag, _ in read.tags} & {"img", "b"}
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    for name, script in read.scripts.items():
        assert name is None
        if "Plotly.newPlot" in script and "plotly.js v" not in script:
            assert not re.search("<(script|/script|img|b>)", script)
    for chart in draw(hostile()):
        for trace in chart.figure.data:
            assert not set(EVILS[:3]) & {trace.name, *(trace.customdata if trace.customdata is not None else ())}


def test_a_ladder_that_has_not_begun():
    read = Read(page(empty(ladders()["loading"], "full", CARD)))
    assert "Nothing is known yet." in read.said
    assert "throughput" not in read.ids


def test_what_draws_is_loaded_only_to_draw():
    code = ("import sys, tightfit.commands.ladder; "
            "sys.exit(bool({'plotly', 'jinja2'} & {name.split('.')[0] for name in sys.modules}))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    (made / "reduced.html").write_text(page(bert_large()), "utf-8")
    (made / "hostile.html").write_text(page(hostile()), "utf-8")
    return made


@needs_chromium
@pytest.mark.parametrize(("width", "theme"), [(1200, "light"), (400, "dark"), pytest.param(
    1200, "dark", marks=pytest.mark.cold), pytest.param(400, "light", marks=pytest.mark.cold)])
def test_charts_are_drawn_and_fit_in_either_theme(visit, width, theme):
    opened = visit("reduced.html", width, theme, drawn=False)
    opened.wait_for_selector("#throughput-chart .main-svg")
    charts_fit(opened, width, 5)
    colours = opened.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
                              " getComputedStyle(document.querySelector('#seconds-chart .xtick text')).fill]")
    back, ink, ticks = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (back < 200) == (theme == "dark")
    assert abs(back - ink) > 500
    assert abs(back - ticks) > 500


@needs_chromium
@pytest.mark.cold
def test_the_keyboard_reaches_tables_and_folded_lines(visit):
    opened = visit("reduced.html", drawn=False)
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(150):
        opened.keyboard.press("Tab")
        at = opened.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.className || '')")
        if at == "BODY ":
            break
        reached.add(at)
    assert {"DIV scroll", "SUMMARY "} <= reached


@needs_chromium
def test_markup_in_a_rungs_name_stays_text_in_a_chart(visit):
    opened = visit("hostile.html", drawn=False)
    opened.wait_for_selector("#seconds-chart .main-svg")
    assert opened.locator("img, #throughput-chart a:not(.modebar-btn)").count() == 0
    assert "alert(" in "".join(opened.locator("#seconds-chart .ytick text").all_text_contents())
