"""Climbing: rungs that run, fail and are skipped; results that are gone on with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ladder.climbs import CPU, DONE, FIGURES, Processes, how, use
from tightfit.errors import MissingLibrary, RecipeError, ReportError
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.climbing import climb
from tightfit.ladder.climbs import Climb
from tightfit.ladder.jobs import Measure, Outcome
from tightfit.ladder.lines import differs, heading, lines
from tightfit.ladder.rows import RESULTS, Machine


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Processes]:
    def stand_in(outcome: Callable[[Measure], Outcome], machine: Machine = CPU, **more: Any) -> Processes:
        return use(monkeypatch, Processes(outcome, machine, **more))

    return stand_in


def go(folder: Path, **changes: Any) -> Climb:
    return climb(how(find_ladder("bert-large"), "smallest", folder, **changes), lambda text: None)


def test_every_rung_becomes_a_row(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    processes(lambda job: DONE)
    done = go(tmp_path)
    shown = lines(done)
    assert [line.rung for line in shown] == list(find_ladder("bert-large").rungs)
    assert all(line.measured is not None and line.measured.median_seconds == 0.2 for line in shown)
    assert all(line.predicted is not None and line.predicted.peak_reserved == 190 for line in shown)
    assert (shown[0].speed, shown[1].speed, shown[1].memory) == (None, 1.0, 1.0)


def test_a_ladder_goes_on_where_it_stopped(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    rungs = len(find_ladder("bert-large").rungs)

    def interrupted(job: Measure) -> Outcome:
        if job.recipe["precision"] == "fp16":
            raise KeyboardInterrupt
        return DONE

    made = processes(interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert made.ran() == 4
    made = processes(lambda job: DONE)
    go(tmp_path)
    assert made.ran() == rungs - 3
    go(tmp_path)
    assert made.ran() == 0
    go(tmp_path, steps=4)
    assert made.ran() == rungs  # another measurement


def test_what_did_not_run_is_a_row_with_its_reason(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    ends = iter([Outcome(status="out-of-memory", reason="because out-of-memory"), Outcome(status="refused"),
                 Outcome(status="timed-out"), Outcome(status="failed"), Outcome(status="killed")])
    made = processes(lambda job: next(ends, DONE))
    shown = lines(go(tmp_path, limit=10.0))
    assert [line.measured.status for line in shown[:6] if line.measured] == [
        "out-of-memory", "refused", "timed-out", "failed", "killed", "done"]  # fmt: skip
    assert shown[0].measured is not None
    assert shown[0].measured.reason == "because out-of-memory"
    assert shown[5].speed is None  # its baseline did not run
    made.ran()
    go(tmp_path, limit=10.0)
    assert made.ran() == 2  # what failed or was killed is tried again
    go(tmp_path, limit=20.0)
    assert made.ran() == 1  # what took too long, with more time


def test_another_machines_rows_are_not_taken_for_this_ones(
    tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    made = processes(lambda job: DONE)
    go(tmp_path)
    made = processes(lambda job: Outcome(figures=replace(FIGURES, samples=8)),
                     replace(CPU, device="NVIDIA T4", kind="cuda"))
    done = go(tmp_path)
    assert made.ran() == len(find_ladder("bert-large").rungs)
    assert {line.measured.samples for line in lines(done) if line.measured} == {8}
    assert any("also hold rows of CPU" in sentence for sentence in heading(done))


def test_a_library_that_is_installed_since_is_tried_again_by_whom_it_serves(
    tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    missing = MissingLibrary("lightning", "the peer lightning", "lightning")
    runners, rungs = ("tightfit", "lightning"), len(find_ladder("bert-large").rungs)
    processes(lambda job: DONE if job.runner == "tightfit" else Outcome(status="refused", reason=str(missing)))
    go(tmp_path, runners=runners)
    made = processes(lambda job: DONE, replace(CPU, versions={**CPU.versions, "lightning": "2.6"}))
    assert all(line.speed == 1.0 for line in lines(go(tmp_path, runners=runners)) if line.runner == "lightning")
    assert [job.runner for job in made.jobs] == ["lightning"] * rungs
    made.ran()
    made = processes(lambda job: DONE, replace(CPU, versions={**CPU.versions, "flash-attn": "2.8"}))
    go(tmp_path)
    assert made.ran() == rungs


def test_two_ladders_do_not_climb_in_one_folder(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    processes(lambda job: DONE)
    source = ("import sys, time; from pathlib import Path; from tightfit.training.run_folder import locked\n"
              "with locked(Path(sys.argv[1])): print(flush=True); time.sleep(600)")
    other: Any = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE)
    with other.stdout:
        other.stdout.readline()
        with pytest.raises(RecipeError, match="output_dir: another process is using"):
            go(tmp_path)
        other.kill()
        other.wait()
    assert all(line.measured is not None for line in lines(go(tmp_path)))


def test_a_few_of_the_lines_that_are_no_results_are_named(
    tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    processes(lambda job: DONE)
    (tmp_path / RESULTS).write_text("what is this\n" * 40)
    said = list[str]()
    climb(how(find_ladder("bert-large"), "smallest", tmp_path), said.append)
    assert sum("is no result" in text for text in said) == 5
    assert "35 more lines are no results either" in said


def test_a_peer_is_the_same_work_or_says_that_it_is_not(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    losses = {"tightfit": (0.7,) * 5, "plain": (0.7, 0.7, 0.7, 0.7001, 0.7), "hf-trainer": (0.7, 0.7, 0.9, 0.7, 0.7)}
    processes(lambda job: Outcome(figures=replace(FIGURES, losses=losses[job.runner])))
    shown = lines(go(tmp_path, runners=("tightfit", "plain", "hf-trainer")))
    assert [line.runner for line in shown[:3]] == ["tightfit", "plain", "hf-trainer"]
    assert shown[1].same_work == ""
    assert shown[1].speed == 1.0
    assert shown[2].same_work == "not the same work: at step 3 its loss is 0.9000, ours 0.7000"
    assert shown[0].measured is not None
    assert shown[2].measured is not None
    short = replace(shown[2].measured, losses=(0.7,))
    assert "1 steps, ours 5" in differs(shown[0].measured, short)


def test_a_wrong_override_is_said_before_anything_runs(tmp_path: Path, processes: Callable[..., Processes]) -> None:
    made = processes(lambda job: DONE)
    with pytest.raises(RecipeError, match="seq_length"):
        go(tmp_path, overrides=["seq_length=8"])
    assert made.ran() == 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    processes(lambda job: DONE)
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="output_dir"):
        go(tmp_path / "file")
