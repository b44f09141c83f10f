"""The ladders' page of the documentation: recorded ladders are picked up by their files' names, and differences from
what was published are explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import generate
import ladders
import recorded as records
from tests.ladder.climbs import CARD, CPU, climbed, empty, predicted
from tightfit.ladder import rows
from tightfit.ladder.catalogue import LADDERS, find_ladder

STATUS = Path(__file__).parents[1] / "docs/status.md"


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)

    def record(name, climb):
        for row in (*climb.rows.measured, *climb.rows.predicted):
            rows.append(tmp_path / name, row)

    return record


def said():
    return generate.pages()["ladder.md"]


def test_without_records_it_says_so(results):
    text = said()
    assert "Not yet measured on a GPU." in text
    assert text.count("Not yet predicted.") == 2
    assert all(f"| `{name}` |" in text for name in LADDERS)


def test_records_are_picked_up_by_name_those_of_gpus_first(results):
    results("ladder-bert-large-cpu.jsonl", climbed())
    assert "Not yet measured on a GPU." in said()
    results("ladder-bert-large-v100.jsonl", climbed("full", CARD, gpu=None))
    text = said()
    assert "Not yet measured on a GPU." not in text
    assert text.index("512 tokens, V100 16 GB\n\nMeasured") < text.index("512 tokens, CPU\n\nMeasured")
    assert "| batch 4, fp32 | 0.1 | 40 | 160 |" in text
    assert "| hf-trainer | speed | 9 | 2.00x | 2.00x |" in text
    assert "On V100 16 GB, `bert-large` (full):" in text
    assert "+ checkpointing against micro-batch 1, accumulation 4 (0.67x, 0.67x)" in text
    assert "pure bf16, 8-bit AdamW, SDPA, compiled: refused: too new" in text


def test_full_size_predictions_stand_beside_what_was_published(results, monkeypatch):
    ladder = find_ladder("transformer-156m")
    climb = empty(ladder, "reduced", CPU, gpu="rtx-a5000")
    first, second = ladder.rungs[:2]
    climb.rows.predicted += [
        predicted(climb, first, "rtx-a5000", "full", 9.0, 9.0),  # of an earlier day: the newest counts
        replace(predicted(climb, first, "rtx-a5000", "full", 2.1, 24_720), context=500 << 20, fits="no"),
        predicted(climb, second, "rtx-a5000", "full", 1.21, 14_600),
        predicted(climb, second, "t4", "full", 7.0, 7.0), predicted(climb, second, "rtx-a5000", "reduced", 7.0, 7.0),
    ]  # fmt: skip
    results("ladder-transformer-156m-cpu.jsonl", climb)
    monkeypatch.setattr(ladders, "DIFFERENCES", {"transformer-156m": {}})
    text = said()
    assert "| fp32 | 2.1 | 2.1 | +0.0 % | 20,600 | 24,720 | +20.0 % | does not fit |" in text
    assert "| bf16 | 1.1 | 1.21 | +10.0 % | 14,600 | 14,600 | +0.0 % |  |" in text
    assert ladders.unexplained() == ["transformer-156m, fp32: memory +20 %"]
    monkeypatch.setattr(ladders, "DIFFERENCES", {"transformer-156m": {"fp32": {"memory": "a loop keeps more"}}})
    assert "| does not fit; memory: a loop keeps more |" in said()
    assert ladders.unexplained() == []


def test_every_recorded_difference_is_explained():
    assert ladders.unexplained() == [], "write why into docs/ladder_differences.py"


def test_the_status_counts_the_times_that_are_predicted_well():
    times = [abs(apart) for _, what, apart in ladders.differences(find_ladder("bert-large")) if what == "time"]
    assert (len(times), sum(apart <= 10 for apart in times)) == (9, 8)
    assert "eight are predicted within 10 % of its time" in STATUS.read_text("utf-8")
