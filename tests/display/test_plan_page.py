"""A plan's page: it stands alone, is readable, and says what the plan does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from tests.display.plans import fitting, nothing_fits, streamed
from tests.page.pages import Read, chart_data, names_stay_names, readable_without_eyes, stands_alone
from tests.profiling.profiled import EVIL, EVILS
from tightfit.display.answers import answers
from tightfit.display.memory_bar import parts_of
from tightfit.display.plan_page import plan_page
from tightfit.planning.plan import Plan
from tightfit.recipe import Recipe

GIB = 1 << 30


@pytest.mark.parametrize(("plan", "charts"), [(fitting(), 2), (streamed(), 3), (nothing_fits(), 2)])
def test_the_page_stands_alone_and_says_what_the_plan_does(plan, charts):
    page = plan_page(plan)
    stands_alone(page)
    readable_without_eyes(page, charts)
    assert len(chart_data(page)) == charts
    said = " ".join(Read(page).said.split())
    for label, text in answers(plan):
        assert label in said
        assert " ".join(text.split()) in said


def test_every_candidate_is_a_point_with_its_interval():
    plan = fitting()
    off = replace(plan.candidates[0].estimate.time, error=0.25)
    first = replace(plan.candidates[0], estimate=replace(plan.candidates[0].estimate, time=off))
    plan = replace(plan, candidates=(first, *plan.candidates[1:]), chosen=first)
    line, *points = chart_data(plan_page(plan))["frontier-chart"]
    assert [point["x"][0] for point in points] == [c.estimate.memory.used / GIB for c in plan.candidates]
    assert [point["y"][0] for point in points] == [10_000, 9_000, 11_000]
    assert points[0]["error_y"]["array"] == [2_500]
    assert [point["marker"]["symbol"] for point in points] == ["diamond", "circle", "x"]
    assert line["y"] == [9_000, 10_000]  # what does not fit is not on it


def test_bars_hold_what_memory_does():
    plan = streamed()
    charts = chart_data(plan_page(plan))
    held = [parts_of(candidate.estimate.memory) for candidate in plan.candidates]
    assert sum(bar["x"][0] for bar in charts["memory-chart"]) == pytest.approx(sum(held[0].values()) / GIB)
    assert sum(bar["x"][1] for bar in charts["host-chart"]) == pytest.approx(48)


def test_the_recipe_is_there_to_copy_and_whole():
    plan = fitting()
    found = plan_page(plan).split("<pre>")[1].split("</pre>")[0]
    read = yaml.safe_load(found.replace("&#34;", '"').replace("&#39;", "'"))
    assert Recipe.from_dict(read) == plan.chosen.recipe
    assert "<pre>" not in plan_page(nothing_fits())


def test_a_plan_without_candidates_has_a_page():
    assert "Nothing fits" in plan_page(replace(nothing_fits(), candidates=()))


def test_names_stay_names():
    plan: Plan = fitting()
    recipe = plan.chosen.recipe.override(model="a/b", output_dir=EVIL, sample_prompt=EVILS[1])
    evil, device = replace(plan.chosen, recipe=recipe), replace(plan.device, name=EVIL)
    names_stay_names(plan_page(replace(plan, candidates=(evil,), chosen=evil, notes=EVILS, device=device)))
