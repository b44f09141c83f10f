"""A ladder's page: every figure with a table beside it, nothing fetched, no name become markup; the picture; the front
and the peers' ratios; a ladder read back from its results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.ladder.climbs import CARD, PEER, REFUSED, STRANGE, climbed, empty, hostile, predicted
from tests.profiling.profiled import EVIL
from tests.reporting.browsing import charts_fit, needs_chromium, themes_differ
from tests.reporting.pages import Read, names_stay_names, readable_without_eyes, stands_alone
from tightfit.errors import MissingLibrary, RecipeError, ReportError
from tightfit.ladder import rows
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.comparisons import front, quantiles, ratios, told, told_at_full_size
from tightfit.ladder.lines import lines
from tightfit.ladder.page import page, write_page
from tightfit.ladder.picture import save_picture
from tightfit.ladder.recorded import recorded


@pytest.fixture(scope="module")
def reduced():
    return page(climbed())


def charts(markup):
    return {name.removesuffix("-data"): json.loads(body) for name, body in Read(markup).scripts.items() if name}


def test_all_of_it_is_there(reduced):
    read = Read(reduced)
    for name in ("ladder", "time", "memory", "full", "front", "features", "peers", "missing", "about"):
        assert name in read.ids
    for word in ("13 of 15", "published (publ.) on V100 16 GB", "reduced shape", "-50.0 %",
                 "predicted, v100-16gb", "predicted differs from measured by",
                 "Pareto front", "DeepSpeed ZeRO", "not measured", "0.67x", "too new",
                 "not run yet", "not the same work", "predicted not to fit at full size", "a rough guess", "abc1234",
                 "2026-11-21 10:00", "16.0 GiB", "micro_batch_size: 1", "3 of 3"):
        assert word in read.said, word


def test_it_stands_alone_and_can_be_read_without_eyes(reduced):
    stands_alone(reduced)
    readable_without_eyes(reduced, 5)


def test_published_figures_stand_beside_measured_ones_at_full_size_alone(reduced):
    def words(markup, chart):
        return [trace["name"] for trace in charts(markup)[chart]["data"]]

    assert words(reduced, "time-chart") == ["measured, CPU", "predicted, CPU"]
    assert words(reduced, "full-time-chart") == ["published, V100 16 GB", "predicted, v100-16gb"]
    full = page(climbed("full", CARD, gpu=None))
    refused = charts(full)["memory-chart"]["data"][1]
    assert refused["y"][12].startswith("13.")
    assert refused["text"][12] == ""  # what did not run took nothing, its context left aside
    assert words(full, "time-chart") == words(full, "memory-chart") == [
        "published, V100 16 GB", "measured, V100 16 GB", "predicted, V100 16 GB"]
    assert "full-time-chart" not in charts(full)
    assert "measured differs from published by" in Read(full).said
    assert "the driver reports" in Read(full).said


def test_only_what_is_of_the_same_card_is_compared(reduced):
    assert "predicted differs from published by" in Read(reduced).said
    other = Read(page(climbed(gpu="rtx-4090"))).said
    assert "predicted, rtx-4090" in other
    assert "published, V100 16 GB" in other
    assert "predicted differs from published by" not in other
    assert "predicted for RTX 4090, another card than that of publ." in other
    h200 = Read(page(climbed("full", replace(CARD, device="NVIDIA H200"), gpu=None))).said
    assert "measured differs from published by" not in h200
    assert "predicted differs from measured by" in h200


def test_a_card_that_was_not_named_is_compared_with_none():
    climb = empty(find_ladder("fp16-batch"), "reduced", gpu="titan-rtx")
    climb.rows.predicted += [predicted(climb, rung, "titan-rtx", "full", 0.5, 8_000)
                             for rung in climb.asked.ladder.rungs]
    said = Read(page(climb)).said
    assert "predicted, titan-rtx" in said
    assert "predicted differs from published by" not in said
    assert "another card" not in said


def test_bars_hold_every_rung_with_a_figure(reduced):
    shown = charts(reduced)
    bars = shown["memory-chart"]["data"][0]
    assert [label.partition(".")[0] for label in bars["y"]] == [str(n) for n in range(1, 15)]
    assert len(shown["full-time-chart"]["data"][0]["y"]) == 14
    assert [trace["name"] for trace in shown["front-chart"]["data"]] == ["on the front", "peers"]


def test_names_stay_names():
    markup = page(hostile())
    assert EVIL in Read(markup).said
    names_stay_names(markup)


def test_a_ladder_that_has_not_begun():
    read = Read(page(empty(find_ladder("loading"), "full", CARD)))
    assert "Nothing is known yet." in read.said
    assert "not run yet" in read.said
    assert "front-chart" not in read.ids


def test_the_front_is_what_none_beats():
    climb = climbed()
    ladder, shown = climb.asked.ladder, lines(climb)
    # every rung is slower than the one before, and takes less: all are on the front, least memory first
    assert [line.rung.name for line in front(shown, ladder)] == [
        rung.name for rung in reversed(ladder.rungs[:-1]) if rung.name != REFUSED]
    worse = [replace(line, measured=replace(line.measured, peak_allocated=1 << 30, peak_reserved=1 << 30))
             if line.runner == "tightfit" and line.rung.name == "+ checkpointing" else line for line in shown]
    assert "+ checkpointing" not in [line.rung.name for line in front(worse, ladder)]
    equal = [replace(line, measured=shown[0].measured) for line in shown[:3] if line.runner == "tightfit"]
    assert len(front(equal, ladder)) == 1


def test_peers_ratios_are_ours_in_theirs():
    found = ratios(lines(climbed()))
    assert {(round(each.speed, 6), round(each.memory, 6)) for each in found} == {(2.0, 0.5)}
    assert [each.line.rung.name for each in found if each.line.same_work] == [STRANGE]
    read = Read(page(climbed()))
    spread = read.said[read.said.index("Over the rungs that are the same work"):]
    assert f"speed, {PEER} 9 2.00x 2.00x 2.00x" in " ".join(spread.split())


def test_quantiles():
    assert quantiles([4.0, None, 0.0, 2.0]) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert quantiles([None]) == []


def test_figures_that_nobody_tells_are_left_out():
    climb = empty(find_ladder("ddp"), "full", CARD)
    seconds, memory = told(lines(climb), climb)
    assert ({who.who: values for who, values in seconds.items()}, memory) == ({"published": [0.55, 0.505, 0.655]}, {})
    climb.asked = replace(climb.asked, gpu="v100-16gb")
    assert told_at_full_size(lines(climb), climb)[1] == {}


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path / "gone" / "page.html", climbed())
    write_page(tmp_path / "page.html", climbed())
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("name", ["a.png", "a.SVG"])
@pytest.mark.parametrize("made", [climbed, hostile, lambda: climbed("full", CARD, None),
                                  lambda: empty(find_ladder("bert-large"), "reduced")])
def test_a_picture_is_drawn(tmp_path, name, made):
    climb = made()
    ladder = climb.asked.ladder
    climb.asked = replace(climb.asked, ladder=replace(ladder, title="costs $\\frac{5"))  # is no formula
    save_picture(tmp_path / name, climb)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if name.endswith("SVG"):
        save_picture(tmp_path / "again.svg", climb)
        assert (tmp_path / "again.svg").read_bytes() == data


def test_a_picture_that_cannot_be_drawn_says_why(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"picture: .* ends in '\.pdf'; write a name that ends in \.png or \.svg"):
        save_picture(tmp_path / "a.pdf", climbed())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingLibrary, match="pip install matplotlib"):
        save_picture(tmp_path / "a.png", climbed())
    assert not list(tmp_path.iterdir())


def test_what_draws_is_loaded_only_to_draw():
    code = ("import sys, tightfit.ladder.page, tightfit.ladder.picture; "
            "sys.exit(bool({'plotly', 'matplotlib'} & {name.split('.')[0] for name in sys.modules}))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_ladder_is_read_back_by_the_names_of_its_rungs(tmp_path):
    path, climb = tmp_path / "ladder.jsonl", climbed()
    other = predicted(climb, climb.asked.ladder.rungs[0], "CPU", "smallest", 9.0, 9.0)
    for row in (*climb.rows.measured, *climb.rows.predicted, other):
        rows.append(path, replace(row, key="of another day"))
    rows.append(path, replace(climb.rows.predicted[0], rung="a rung that is gone"))
    found = recorded(path)
    assert (found.asked.scale, found.asked.gpu, found.asked.runners) == ("reduced", "v100-16gb", ("tightfit", PEER))

    def figures(climb):
        return [(line.name, line.measured and line.measured.seconds, line.predicted and line.predicted.step_seconds,
                 line.full and line.full.fits, line.speed, line.same_work) for line in lines(climb)]

    assert figures(found) == figures(climb)


def test_results_without_a_measurement_are_no_ladder(tmp_path):
    with pytest.raises(ReportError, match="holds no rung that was measured"):
        recorded(tmp_path / "none.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    write_page(made / "reduced.html", climbed())
    write_page(made / "hostile.html", hostile())
    return made


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_charts_are_drawn_and_fit(visit, width, theme):
    opened = visit("reduced.html", width, theme)
    charts_fit(opened, width, 5)
    themes_differ(opened, theme, "time-chart")


@needs_chromium
def test_the_keyboard_reaches_tables_and_folded_lines(visit):
    opened = visit("reduced.html")
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    opened.keyboard.press("Enter")
    assert opened.evaluate("location.hash") == "#ladder"
    reached = set()
    for _ in range(100):
        opened.keyboard.press("Tab")
        at = opened.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.className || '')")
        if at == "BODY ":
            break
        reached.add(at)
    assert {"DIV scroll", "SUMMARY "} <= reached


@needs_chromium
def test_hovering_a_bar_names_its_rung_and_markup_stays_text(visit):
    opened = visit("hostile.html")
    assert opened.locator("img, #front-chart a").count() == 0
    bar = opened.locator("#time-chart .barlayer path").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.wait_for_selector("#time-chart .hoverlayer .hovertext")
    assert "alert(" in "".join(opened.locator("#time-chart .ytick text").all_text_contents())
