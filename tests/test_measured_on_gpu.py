"""Predictions against what was measured on a GPU and recorded: no device is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmark_modules import benchmark
from tightfit.devices import MIB

RESULTS = Path(__file__).parent.parent / "results"
RECORDINGS = sorted((RESULTS / "allocator_recordings").glob("*.json.gz"))
SLACK = 2 * MIB
"""A small segment, of the few bytes that attention kernels ask for besides."""
CASES = (
    "gpt2 16x1024 precision=bf16-pure, fill 80",  # autograd's workspace lies in the block of the logits
    "gpt2 8x1024*4, fill 75",
    "gpt2 8x1024*2.5 attention=eager, retries",  # fails
    "gpt2-medium 16x1024 checkpointing=every-nth, fill 96",
    "bert-large 16x384*3.25, fill 95",  # states are made behind all micro-batches
    "llama-3.2-1b 4x2048, fill 30",  # the head that is tied leaves a block
    "gpt2 16x1024, fill 52, expandable segments",
    "gpt2-medium 8x512 optimizer=lion, fill 38",
)


@pytest.fixture(scope="module")
def rows():
    read = map(json.loads, (RESULTS / "plan_vs_gpu.jsonl").read_text().splitlines())
    return {row["name"]: row for row in read if row.get("measured")}


@pytest.mark.parametrize("name", CASES)
def test_a_peak_is_the_measured_one(name, rows):
    cases, predictions = benchmark("gpu_cases"), benchmark("gpu_predictions")
    row = rows[name]
    (case,) = [case for case in cases.all_cases() if case.name == name]
    device = predictions.device_of(row["device"])
    found = predictions.predict_case(case, case.recipe(Path()), device, None, row["predicted"]["limit"])
    measured = row["measured"]
    assert (found["fits"] != "no") == (measured["outcome"] == "ran")
    if measured["outcome"] == "ran":
        assert abs(found["peak_reserved"] - measured["peak_reserved"]) <= SLACK
        assert found["peak_allocated"] == pytest.approx(measured["peak_allocated"], rel=1e-3)
        for kind, size in measured["categories"].items():
            assert found["categories"][kind] == pytest.approx(size, rel=0.01), kind


def test_there_are_recordings():
    assert len(RECORDINGS) >= 6


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_block_lies_where_the_real_allocator_put_it(path):
    recordings = benchmark("allocator_recordings")
    recording = recordings.read_recording(path)
    found = recordings.compare(recording)
    assert found.allocations > 4000
    assert (found.moved, found.off) == (0, 0)
    assert found.peak_reserved[0] == found.peak_reserved[1]
