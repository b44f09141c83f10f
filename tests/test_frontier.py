"""Throughput against memory: what runs at a budget, and what is made of it, with a stand-in for the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmark_modules import benchmark
from tests.ladder.made import CARD, CPU, DONE, MIB, Processes, done, use
from tightfit.devices import parse_memory
from tightfit.ladder.jobs import Job, Outcome
from tightfit.ladder.rows import OURS

frontier = benchmark("frontier")
BUDGET = parse_memory("8GB")


def fits(job: Job) -> Outcome:
    """What takes micro-batches of 8 and more runs out of memory; smaller ones are the slower."""
    micro = job.recipe["micro_batch_size"]
    if micro == "auto":
        return DONE
    return Outcome(status="out-of-memory") if micro >= 8 else done(samples=micro)


def test_a_peer_is_tried_at_the_largest_micro_batch_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = use(monkeypatch, Processes(fits, CARD.model_copy(update={"device": "RTX A5000"})))  # which computes bf16
    study = frontier.on_gpu("gpt2-medium", ["8GB"])
    frontier.explored(study, "8GB", ["plain"], tmp_path)
    assert [job.runner for job in made.jobs[:2]] == [OURS, OURS]
    flags = len(list(frontier.combinations(study.flags)))
    assert [job.recipe["micro_batch_size"] for job in made.jobs[2:]] == [64, 32, 16, 8, 4] + [4, 8] * (flags - 1)
    assert {job.memory for job in made.jobs} == {BUDGET}
    assert made.predicted == 0
    made.jobs.clear()
    frontier.explored(study, "8GB", ["plain"], tmp_path)
    assert made.jobs == []
    points = {point["who"]: point for point in frontier.summary(tmp_path)}
    assert sorted(points) == ["plain", "the plan", "the plan, numerics free"]
    assert points["plain"]["budget_bytes"] == BUDGET
    assert points["plain"]["rung"].endswith("micro-batch 4")


def test_the_dry_run_goes_all_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def took(job: Job) -> Outcome:
        micro = job.recipe["micro_batch_size"]
        return done(peak_reserved=(4 if micro == "auto" else micro) * MIB)

    made = use(monkeypatch, Processes(took, CPU))
    assert frontier.main(["--dry", str(tmp_path)]) == 0
    assert [job.recipe["micro_batch_size"] for job in made.jobs] == ["auto", "auto", 16, 4, 4, 16]
    (written,) = tmp_path.glob("frontier-gpt2-*.json")
    points = json.loads(written.read_text())["points"]
    assert [(point["budget_bytes"] // MIB, point["who"]) for point in points] == [
        (budget, who) for budget in (8, 1024) for who in ("hf-trainer", "the plan", "the plan, numerics free")]
    assert points[0]["rung"] == "bf16, adamw, none, micro-batch 4"
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_ran_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Processes(lambda job: Outcome(status="failed", reason="because"), CPU))
    assert frontier.main(["--dry", str(tmp_path)]) == 1
    monkeypatch.setattr(frontier.torch.cuda, "is_available", lambda: False)
    assert frontier.main([]) == 2
