"""Results in a file: appended whole, read back, and what is no result named and left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ladder.made import CPU
from tightfit.ladder import rows
from tightfit.ladder.rows import Measured, Predicted


def measured(**changes: object) -> Measured:
    values = {
        "ladder": "bert-large", "rung": "batch 4, fp32", "runner": "tightfit", "scale": "smallest", "key": "k",
        "status": "done", "machine": CPU, "recipe": {"model": "bert-large"}, "date": "2026-11-21",
        "seconds": (0.3, 0.1, 0.2), "samples": 4, "tokens": 512, "losses": (0.7, 0.6), "peak_allocated": 10,
        "peak_reserved": 20, "context": 5,
    }  # fmt: skip
    return Measured(**{**values, **changes})


PREDICTED = Predicted(ladder="bert-large", rung="batch 4, fp32", scale="full", key="k", device="t4", fits="yes",
                      step_seconds=0.5, samples=4, notes=("a note",))  # fmt: skip


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for row in (measured(), PREDICTED):
        rows.append(path, row)
    found = rows.read(path)
    assert (found.measured, found.predicted, found.skipped) == ([measured()], [PREDICTED], [])


def test_figures_are_of_the_median_step() -> None:
    row = measured()
    assert (row.median_seconds, row.samples_per_second, row.driver_bytes) == (0.2, 20.0, 25)
    assert PREDICTED.samples_per_second == 8.0


@pytest.mark.parametrize("line", [
    "not json", '{"kind": "measured"}', '{"kind": "other"}', "[1, 2]", "17", '{"kind": "predicted", "ladder": 3}',
    json.dumps({"kind": "predicted", "ladder": "a", "rung": "b", "scale": "c", "key": "d", "device": "e",
                "step_seconds": "fast"}),
    json.dumps({"kind": "predicted", "ladder": "a", "rung": "b", "scale": "c", "key": "d", "device": "e",
                "step_seconds": math.nan}),
    "[" * 5000,
])  # fmt: skip
def test_a_line_that_is_no_result_is_named_and_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, measured())
    with path.open("a") as file:
        file.write(line + "\n")
    rows.append(path, PREDICTED)
    found = rows.read(path)
    assert (len(found.measured), len(found.predicted)) == (1, 1)
    assert len(found.skipped) == 1
    assert f"{path}:2" in found.skipped[0]


def test_a_line_that_is_no_result_is_named_with_what_is_wrong_first(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "measured", "ladder": 3}\n{}\n')
    assert rows.read(path).skipped == [
        f"{path}:1: this line is no result and is left out (measured: ladder: Input should be a valid string)",
        f"{path}:2: this line is no result and is left out (Unable to extract tag using discriminator 'kind')"]


@pytest.mark.parametrize("wrong", [
    {"samples": 10**400}, {"notes": None}, {"notes": 7},
    {"context": "much"}, {"recipe": [1]}, {"status": 4}, {"runner": {}}, {"machine": None}, {"peak_reserved": 10**400},
    {"machine": {**measured().machine.model_dump(), "device": None}},
])  # fmt: skip
def test_a_foreign_value_is_named_with_its_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, measured())
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}) + "\n")
    found = rows.read(path)
    assert found.measured == []
    assert f"{path}:1" in found.skipped[0]


def test_a_row_after_a_line_that_was_cut_off_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "meas')
    rows.append(path, measured())
    found = rows.read(path)
    assert len(found.measured) == 1
    assert len(found.skipped) == 1


def test_fields_of_a_newer_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, measured())
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "watts": 300}) + "\n")
    assert rows.read(path).measured == [measured()]


def test_bytes_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(bytes(range(256)) * 40)
    assert rows.read(path).skipped
    rows.append(path, measured())
    assert rows.read(path).measured == [measured()]


def test_a_fingerprint_is_of_what_is_run_and_not_of_where_it_is_kept() -> None:
    recipe = {"model": "gpt2", "seq_len": 8, "output_dir": "a"}
    key = rows.input_fingerprint(recipe, steps=3)
    assert key == rows.input_fingerprint({**recipe, "output_dir": "b"}, steps=3)
    others = {rows.input_fingerprint({**recipe, "seq_len": 16}, steps=3), rows.input_fingerprint(recipe, steps=4)}
    assert len({key, *others}) == 3


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "results").glob("ladder-*.jsonl")),
                         ids=lambda path: path.stem)
def test_recorded_results_can_be_read(path: Path) -> None:
    found = rows.read(path)
    assert found.measured
    assert found.predicted
    assert not found.skipped
