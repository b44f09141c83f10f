"""The bert-large ladder as a person climbs it, at its smallest: a process a rung, memory in the published order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.ladder.climbs import how
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.climbing import climb
from tightfit.ladder.lines import lines


def test_memory_falls_as_published(tmp_path: Path) -> None:
    ladder = find_ladder("bert-large")
    published = replace(ladder, rungs=tuple(rung for rung in ladder.rungs if rung.published is not None))
    said: list[str] = []
    done = climb(how(published, "smallest", tmp_path, steps=1), said.append)
    shown = {line.rung.name: line for line in lines(done)}
    assert len(shown) == 9
    peaks = {}
    for name, line in shown.items():
        assert line.measured is not None
        assert line.measured.status == "done", line.measured
        assert line.predicted is not None
        assert line.predicted.peak_allocated == pytest.approx(line.measured.peak_allocated, rel=0.002), name
        peaks[name] = line.measured.peak_allocated
    plain = peaks["batch 4, fp32"]
    assert plain > peaks["micro-batch 1, accumulation 4"] > peaks["+ checkpointing"]
    assert max(peaks["batch 4, Adafactor"], peaks["batch 4, 8-bit AdamW"]) < plain
    assert peaks["accumulation, checkpointing, fp16, Adafactor"] == min(peaks.values())
    assert any("rung 9 of 9" in sentence for sentence in said)
