"""The page of what was measured on a GPU, from records as the benchmarks write them."""

from __future__ import annotations

import json

from gpu_records import gpu_page
from tests.benchmark_modules import benchmark

MADE = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-23", "commit": "abc1234"}


def test_without_records_it_says_what_is_not_yet_measured(tmp_path):
    title, text = gpu_page(tmp_path)
    assert title == "# Measured on a GPU"
    assert text.startswith("Not yet measured: plans against measurements, the allocator, beyond the card's memory,")


def test_each_record_is_a_section(tmp_path):
    rows = {"case": {"recipe": {}, "tokens": 4096, "measured": {"seconds": {"median": 2.0}, "host": 110},
                     "predicted": {"step_seconds": 1.0, "mfu": 0.5, "peak_allocated": 5, "peak_reserved": 5,
                                   "host": 100}}}
    told = benchmark("beyond_gpu").summary(rows)
    (tmp_path / "beyond_gpu-h200.json").write_text(json.dumps({"environment": MADE, **told}))
    planned = benchmark("gpu_summary").summarize([], planned=3)
    (tmp_path / "plan_vs_gpu-h200.json").write_text(json.dumps({"environment": MADE, **planned}))

    parts = gpu_page(tmp_path)

    assert parts[1] == "## Plans against measurements"
    assert parts[2].startswith("NVIDIA H200; recorded 2026-11-23 with torch 2.11.0, commit abc1234: [plan_vs_gpu-h200")
    table = parts[parts.index("## Beyond the card's memory") + 3]
    assert table[1] == [("case", "4,096", "2,048", "25.0%", "200.0%", "", "", "110.0%")]
    assert parts[-1].startswith("Not yet measured: the allocator, tests on the card, speeds of the card and its link,")
