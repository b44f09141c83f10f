"""The arithmetic behind the comparison with a GPU: errors, misses and goals."""

from __future__ import annotations

import pytest

from tests.benchmark_modules import benchmark
from tightfit.recipe import Recipe

summary = benchmark("gpu_summary")


def row(name, fits="yes", outcome="ran", reserved=(100, 100), seconds=(1.0, None, 1.0), retries=0, group="models"):
    """reserved: predicted and measured. seconds: uncalibrated, calibrated, measured."""
    planned, found = reserved
    measured = {"outcome": outcome, "retries": retries, "phases": {"forward": found, "backward": found}}
    if outcome == "ran":
        measured |= {"peak_reserved": found, "peak_allocated": found, "step_seconds": seconds[2], "context": 400,
                     "categories": {"weights": 50}}
    return {
        "name": name, "group": group, "measured": measured, "recipe": Recipe.from_dict({"optimizer": "sgd"}).to_dict(),
        "predicted": {
            "fits": fits, "peak_reserved": planned, "peak_allocated": planned, "context": 300,
            "phases": {"forward": planned, "backward": found}, "categories": {"weights": 50},
            "step_seconds": {"uncalibrated": seconds[0], "calibrated": seconds[1]},
        },
    }  # fmt: skip


def test_spread_is_of_sizes_and_keeps_the_bias():
    errors = [(-1) ** n * n / 100 for n in range(1, 21)]
    found = summary.spread(errors)
    assert found["count"] == 20
    assert found["median"] == pytest.approx(0.105)
    assert found["p95"] == pytest.approx(0.19)  # the 19th of 20
    assert found["worst"] == pytest.approx(0.20)
    assert summary.spread([0.1, -0.3, -0.2])["bias"] == pytest.approx(-0.2)
    assert summary.spread([]) == {"count": 0}


def test_goals_are_judged_by_their_figures():
    rows = [row(f"case {n}", reserved=(100 + n / 2, 100), seconds=(1.05, 1.02, 1.0)) for n in (1, 2, 3, -2, 9)]
    for error, told in zip((0.1, 0.06, 0.04, None, 0.2), rows, strict=True):
        told["predicted"]["speed_error"] = {"uncalibrated": error, "calibrated": None}
    found = summary.summarize(rows, planned=7)
    assert found["measured"] == 5
    assert found["errors"]["reserved"]["median"] == pytest.approx(0.01)
    assert found["errors"]["context"]["bias"] == pytest.approx(-0.25)
    assert found["errors"]["phases: backward"]["worst"] == 0
    assert found["errors"]["categories: weights"]["worst"] == 0
    verdicts = {goal["goal"]: goal["met"] for goal in found["goals"]}
    assert verdicts == {
        "reserved memory, median error": True, "reserved memory, error at 95 %": False, "false fits": True,
        "step time uncalibrated, median error": True, "step time calibrated, median error": True,
        "step times outside of the stated interval": False,  # one of four
    }
    assert found["inside_interval"] == 0.75
    assert found["by_choice"]["optimizer=sgd"]["reserved"]["count"] == 5


def test_a_goal_without_a_measurement_is_neither_met_nor_missed():
    assert {goal["met"] for goal in summary.summarize([], planned=3)["goals"]} == {None}
    found = summary.summarize([row("one")], planned=1)
    assert {goal["goal"]: goal["met"] for goal in found["goals"]}["step time calibrated, median error"] is None


def test_misses_are_told_apart():
    out = "out of memory"
    rows = [
        row("false fit", outcome=out), row("false fit with retries", fits="with-retries", outcome=out),
        row("as planned", fits="no", outcome=out), row("too careful", fits="no"),
        row("retried as planned", fits="with-retries", retries=2, reserved=(100, 80)),
        row("retried unplanned", retries=1),
        {"name": "refused", "group": "models", "refused": "not installed"},
        {"name": "crashed", "group": "models", "failure": "ended by SIGSEGV", "measured": None},
    ]  # fmt: skip
    found = summary.summarize(rows, planned=8)
    assert found["false_fits"] == ["false fit", "false fit with retries"]
    assert found["fitted_though_planned_not_to"] == ["too careful"]
    assert found["planned_not_to_fit"] == 2
    assert (found["planned_with_retries"], found["retried_as_planned"]) == (2, 1)
    assert found["retried_unplanned"] == ["retried unplanned"]
    assert found["errors"]["reserved"]["count"] == 1  # only where nothing kept the allocator from what it wanted
    assert list(found["refused"]) == ["refused"]
    assert list(found["failed"]) == ["crashed"]
    assert [goal["met"] for goal in found["goals"] if goal["goal"] == "false fits"] == [False]
    told = "\n".join(summary.lines(found, rows))
    assert "false fits                                       2   goal: at most 0   MISSED" in told
    assert "ran though planned not to fit: too careful" in told


def test_the_figure_is_drawn(tmp_path):
    rows = [row(f"case {n}", reserved=(n << 30, n << 30), seconds=(0.1 * n, 0.11 * n, 0.1 * n)) for n in (1, 5, 20)]
    summary.plot(rows, tmp_path / "figure.png", "a title")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
