"""The ladders' page of the documentation: recorded ladders are picked up by their files' names, and differences from
what was published are explained."""

from __future__ import annotations

from pathlib import Path

import pytest

import generate
import ladders
import recorded as records
from tests.ladder.made import CARD, CPU, PEER, bert_large, empty, predicted
from tightfit.ladder import rows
from tightfit.ladder.catalogue import ladders as named
from tightfit.ladder.results import rung_results

STATUS = Path(__file__).parents[1] / "docs/status.md"


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)

    def record(name, run):
        for row in (*run.rows.measured, *run.rows.predicted):
            rows.append(tmp_path / name, row)

    return record


def said():
    return generate.pages()["ladder.md"]


def test_without_records_it_says_so(results):
    text = said()
    assert "Not yet measured on a GPU." in text
    assert text.count("Not yet predicted.") == 2
    assert all(f"| `{name}` |" in text for name in named())


def test_records_are_picked_up_by_name_those_of_gpus_first(results):
    results("ladder-bert-large-cpu.jsonl", bert_large())
    assert "Not yet measured on a GPU." in said()
    results("ladder-bert-large-v100.jsonl", bert_large("full", CARD, gpu=None))
    text = said()
    assert "Not yet measured on a GPU." not in text
    assert text.index("512 tokens, V100 16 GB\n\nMeasured") < text.index("512 tokens, CPU\n\nMeasured")
    assert "| batch 4, fp32 | 0.1 ±5% | 40 | 160 |" in text
    assert "| hf-trainer | speed | 9 | 2.00x | 2.00x |" in text
    assert "On V100 16 GB, `bert-large` (full):" in text
    assert "+ checkpointing against micro-batch 1, accumulation 4 (0.67x, 0.67x)" in text
    assert "pure bf16, 8-bit AdamW, SDPA, compiled: refused: too new" in text


def test_full_size_predictions_stand_beside_what_was_published(results, monkeypatch):
    ladder = named()["transformer-156m"]
    run = empty(ladder, "reduced", CPU, gpu="rtx-a5000")
    first, second = ladder.rungs[:2]
    run.rows.predicted += [
        predicted(run, first, "rtx-a5000", "full", 9.0, 9.0),  # of an earlier day: the newest counts
        predicted(run, first, "rtx-a5000", "full", 2.1, 24_720, context=500 << 20, fits="no"),
        predicted(run, second, "rtx-a5000", "full", 1.21, 14_600),
        predicted(run, second, "t4", "full", 7.0, 7.0), predicted(run, second, "rtx-a5000", "reduced", 7.0, 7.0),
    ]  # fmt: skip
    results("ladder-transformer-156m-cpu.jsonl", run)
    monkeypatch.setattr(ladders, "DIFFERENCES", {"transformer-156m": {}})
    text = said()
    assert "| fp32 | 2.1 | 2.1 | +0.0 % | 20,600 | 24,720 | +20.0 % | does not fit |" in text
    assert "| bf16 | 1.1 | 1.21 | +10.0 % | 14,600 | 14,600 | +0.0 % |  |" in text
    assert ladders.unexplained() == ["transformer-156m, fp32: memory +20 %"]
    monkeypatch.setattr(ladders, "DIFFERENCES", {"transformer-156m": {"fp32": {"memory": "a loop keeps more"}}})
    assert "| does not fit; memory: a loop keeps more |" in said()
    assert ladders.unexplained() == []


def test_a_ladder_is_read_back_by_the_names_of_its_rungs(tmp_path):
    path, run = tmp_path / "ladder.jsonl", bert_large()
    other = predicted(run, run.ladder.rungs[0], "CPU", "smallest", 9.0, 9.0)
    for row in (*run.rows.measured, *run.rows.predicted, other):
        rows.append(path, row.model_copy(update={"key": "of another day"}))
    rows.append(path, run.rows.predicted[0].model_copy(update={"rung": "a rung that is gone"}))
    found = ladders.recorded(path)
    assert (found.scale, found.gpu, found.runners) == (
        "reduced", "v100-16gb", ("tightfit", PEER))

    def figures(run):
        return [(each.name, each.measured and each.measured.seconds, each.predicted and each.predicted.step_seconds,
                 each.full and each.full.fits, each.speed, each.other_work) for each in rung_results(run)]

    assert figures(found) == figures(run)
    assert ladders.recorded(tmp_path / "none.jsonl") is None


def test_every_recorded_difference_is_explained():
    assert ladders.unexplained() == [], "write why into docs/ladder_differences.py"


def test_the_status_counts_the_times_that_are_predicted_well():
    times = [abs(apart) for _, what, apart in ladders.differences(named()["bert-large"]) if what == "time"]
    assert (len(times), sum(apart <= 10 for apart in times)) == (9, 8)
    assert "eight are predicted within 10 % of its time" in STATUS.read_text("utf-8")
