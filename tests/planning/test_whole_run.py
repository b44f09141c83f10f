"""The length and cost of a whole run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.display.plans import fitting
from tightfit.display.plan_table import plan_text
from tightfit.errors import RecipeError
from tightfit.planning.whole_run import parse_tokens


@pytest.mark.parametrize(("text", "count"), [
    ("1B", 10**9), ("1.5b", 15 * 10**8), ("500M", 5 * 10**8), ("20_000", 20_000), ("20,000", 20_000),
    ("2e6", 2 * 10**6), ("3T", 3 * 10**12),
])  # fmt: skip
def test_tokens_are_read_as_people_write_them(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "B", "-1", "0", "1e999", "nan", "1G", "ten"])
def test_what_is_no_number_of_tokens_says_what_to_write(text):
    with pytest.raises(RecipeError, match="such as 500M"):
        parse_tokens(text)


def test_a_plan_says_how_long_a_run_takes_and_what_it_costs():
    """10,000 tokens a second, give or take a quarter, for 2.50 an hour."""
    plan = fitting()
    best = plan.chosen.estimate
    best = replace(plan.chosen, estimate=replace(best, time=replace(best.time, error=0.25)))
    plan = replace(plan, candidates=(best, *plan.candidates[1:]), chosen=best, tokens=360_000_000, price=2.5)
    run = plan.whole_run
    assert (run.hours, run.low, run.high, run.cost) == (10.0, 8.0, pytest.approx(40 / 3), 25.0)
    text = " ".join(plan_text(plan).split())
    assert "10.0 hours (8.0 to 13.3) for 360,000,000 tokens, cost 25.00 at 2.5 an hour" in text
    assert plan.to_json()["whole_run"]["hours"] == 10.0
    longer = str(replace(plan, tokens=24 * 360_000_000).whole_run)
    assert longer.startswith("240.0 hours (192.0 to 320.0), 10.0 days, for 8,640,000,000 tokens")
    assert "60.0 minutes" in str(replace(plan, tokens=36_000_000).whole_run)
    assert "whole_run" not in replace(plan, tokens=0).to_json()


def test_steps_that_a_recipe_was_written_with_are_a_run_too():
    plan = fitting()
    time = plan.chosen.estimate.time
    written = replace(plan, asked=plan.asked.override(max_steps=7200))
    assert written.whole_run.hours == pytest.approx(2 * time.step_seconds)
    assert written.whole_run.tokens == round(7200 * time.step_seconds * time.throughput)
    assert plan.whole_run is None
    assert replace(plan, asked=plan.asked.override(seq_len=512)).whole_run is None
    assert replace(plan, asked=plan.asked.override(max_steps=300)).whole_run.tokens == round(
        300 * time.step_seconds * time.throughput)
    assert replace(plan, asked=written.asked.override(num_train_epochs=2)).whole_run is None


def test_compiling_is_part_of_a_run():
    plan = fitting()
    compiled = replace(plan.chosen, recipe=plan.chosen.recipe.override(compile="per-block"))
    plan = replace(plan, chosen=compiled, tokens=300_000, price=3600)
    run, seconds = plan.whole_run, 300_000 / plan.chosen.estimate.time.throughput
    assert (run.hours * 3600, run.cost) == (pytest.approx(60 + seconds), pytest.approx(60 + seconds))
    assert "90.0 seconds for 300,000 tokens, compiling for 60 s or so counted, cost" in str(run)
    assert plan.to_json()["whole_run"]["startup_seconds"] == 60
