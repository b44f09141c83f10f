"""How the choice of a search is judged, and how long planning may take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.backends.pytorch.simulate.target_cases import gpu
from tests.benchmark_modules import benchmark
from tightfit.devices import find_device

quality, latency = map(benchmark, ("search_quality", "plan_latency"))


def test_rank_correlation_and_noise():
    assert quality.ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert quality.spearman([1, 2, 3, 4], [10, 20, 30, 45]) == pytest.approx(1.0)
    assert quality.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 * (0 + 1 + 1 + 0 + 0) / (5 * 24)
    assert quality.spearman([1, 2, 3, 4, 5], [1, 3, 2, 4, 5]) == pytest.approx(0.9)
    assert quality.noise([[1.0, 1.1, 1.2, 1.3], [2.0, 2.0]]) == pytest.approx((0.1 / 1.1) / 2)


def test_a_choice_is_judged_against_the_best_beyond_noise():
    recipe = quality.grid(quality.MODELS["gpt2"])[0]
    fast, slow = quality.Entry(recipe, 1.1, [1.0, 1.0]), quality.Entry(recipe, 1.0, [1.05, 1.05])
    far = quality.Entry(recipe, 3.0, [2.0, 2.0])
    found = quality.judge([fast, slow, far], slow)
    assert found["chosen_behind_best"] == pytest.approx(0.05)
    assert found["fastest_predicted_behind_best"] == pytest.approx(0.05)
    assert found["met"] == {"chosen": True, "correlation": False}
    assert not quality.judge([fast, slow, far], far)["met"]["chosen"]


def test_the_grid_is_accepted_and_fused_is_auto():
    cpu = replace(gpu(8), kind="cpu", capability=None)
    for values in quality.MODELS.values():
        recipes = quality.grid(values)
        assert len(recipes) == 48
        assert not [reason for recipe in recipes for reason in recipe.refusals(cpu)]
    plain, fused = (recipes[0].override(optimizer=o) for o in ("adamw", {"name": "adamw", "implementation": "fused"}))
    assert quality._settings(plain) == quality._settings(fused)
    assert quality._settings(plain) != quality._settings(recipes[0].override(micro_batch_size=8))


def test_the_slowest_case_decides():
    found = {
        "prediction llama-3.1-8b h100-sxm": {"cold_seconds": 4.0}, "prediction gpt2 t4": {"cold_seconds": 9.0},
        "search gpt2 t4": {"cold_seconds": 30.0}, "search t5-base t4": {"cold_seconds": 61.0},
        "search broken t4": {"failure": "no"}, "eager gpt2 t4": {"cold_seconds": 9.0},
    }
    prediction, search, eager, compiled = latency.judge(found)
    assert (prediction["met"], prediction["seconds"]) == (True, 4.0)
    assert (search["met"], search["slowest"]) == (False, "search t5-base t4")
    assert (eager["met"], compiled["met"]) == (True, None)
    assert [goal["met"] for goal in latency.judge({})] == [None] * 4
    assert len({case.name for case in latency.CASES}) == len(latency.CASES)
    for case in latency.CASES:
        assert case.gpu == "cpu" or find_device(case.gpu)
