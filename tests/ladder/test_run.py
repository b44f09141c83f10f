"""Running a ladder: rungs that run, fail, are skipped and are predicted; results that are gone on with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ladder.made import CPU, DONE, Processes, done, ladder_run, use
from tightfit.errors import MissingLibrary, RecipeError, ReportError
from tightfit.ladder import run as running
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.jobs import Job, Outcome
from tightfit.ladder.results import heading, other_work, remarks, rung_results
from tightfit.ladder.rows import RESULTS, Machine, is_far_off, read
from tightfit.ladder.run import RUNG_SECONDS, LadderRun, run_rungs, this_machine
from tightfit.ladder.rungs import Ladder, Rung, card
from tightfit.ladder.table import cells, notes

LADDER = ladders()["bert-large"]
RUNGS = [rung.name for rung in LADDER.rungs]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LadderRun, Processes, list[str]]]:
    """Runs BERT-large's ladder with stand-ins, and returns what came of it, what was started and what was said."""

    def ran(outcome: Callable[[Job], Outcome] = lambda job: DONE, machine: Machine = CPU, hangs: tuple[int, ...] = (),
            folder: Path = tmp_path, ladder: Ladder = LADDER, **asked: Any) -> tuple[LadderRun, Processes, list[str]]:
        made, said = use(monkeypatch, Processes(outcome, machine, hangs)), list[str]()
        run = ladder_run(ladder, "smallest", folder, this_machine(LADDER.recipe(LADDER.rungs[0])), said.append, **asked)
        try:
            run_rungs(run)
        except KeyboardInterrupt:
            said.append("interrupted")
        return run, made, said

    return ran


Go = Callable[..., tuple[LadderRun, Processes, list[str]]]


def test_every_rung_becomes_a_row(go: Go) -> None:
    run, _, said = go(gpu="t4")
    shown = rung_results(run)
    assert [result.rung for result in shown] == list(LADDER.rungs)
    assert all(result.measured is not None and result.measured.median_seconds == 0.2 for result in shown)
    assert all(result.predicted is not None and result.predicted.peak_reserved == 190 for result in shown)
    assert (shown[0].speed, shown[1].speed, shown[1].memory) == (None, 1.0, 1.0)
    assert [text for text in said if text.startswith(("rung", "predicting"))] == [
        *(f"rung {number} of 15: {name}" for number, name in enumerate(RUNGS, start=1)),
        *(f"predicting {number} of 15 {where}: {name}" for where in ("for CPU", "for t4, at full size")
          for number, name in enumerate(RUNGS, start=1))]  # figures are measured before any is predicted


def test_a_ladder_goes_on_where_it_stopped(go: Go) -> None:
    def interrupted(job: Job) -> Outcome:
        if job.recipe["precision"] == "fp16":
            raise KeyboardInterrupt
        return DONE

    _, made, said = go(interrupted)
    assert (made.ran(), said[-1]) == (4, "interrupted")
    _, made, said = go()
    assert (made.ran(), made.predicted) == (len(RUNGS) - 3, len(RUNGS))
    assert said[0] == "resuming: 3 of 15 rungs have their row, or need none"
    _, made, _ = go()
    assert (made.ran(), made.predicted) == (0, 0)
    _, made, _ = go(steps=4)
    assert (made.ran(), made.predicted) == (len(RUNGS), 0)  # another measurement


def test_fresh_runs_and_predicts_anew(go: Go) -> None:
    go()
    run, made, _ = go(lambda job: done(samples=8), fresh=True)
    assert (made.ran(), made.predicted) == (len(RUNGS), len(RUNGS))
    assert len(read(run.path).measured) == 2 * len(RUNGS)
    assert {result.measured.samples for result in rung_results(go()[0])} == {8}


def test_rungs_whose_steps_spread_are_measured_in_further_rounds(go: Go) -> None:
    noisy = iter([(0.1, 0.2, 0.9, 3.0), (0.2, 0.2, 0.2, 0.2), (0.2, 0.2, 0.2, 0.2)])

    def outcome(job: Job) -> Outcome:
        return done(seconds=next(noisy)) if job.recipe["precision"] == "fp16" else DONE

    few = replace(LADDER, rungs=LADDER.rungs[:4])
    run, made, said = go(outcome, ladder=few)
    assert made.ran() == 6
    assert [text for text in said if text.startswith("round")] == [
        f"round 2, 1 of 1: {RUNGS[3]}", f"round 3, 1 of 1: {RUNGS[3]}"]
    row = rung_results(run)[3].measured
    assert (len(row.seconds), row.median_seconds, row.is_steady, row.round) == (12, 0.2, True, 2)
    assert go(outcome, ladder=few)[1].ran() == 0  # no round is made twice


def test_what_stays_noisy_is_marked_and_its_factor_too(go: Go) -> None:
    few = replace(LADDER, rungs=LADDER.rungs[:2])
    run, made, _ = go(lambda job: done(seconds=(0.1, 0.2, 0.9, 3.0)), ladder=few)
    assert made.ran() == 3 * 2
    first, second = rung_results(run)
    assert not first.is_noise
    assert second.is_noise
    assert any(text.startswith("noisy: half of its 12 timed steps took") for text in remarks(second))
    _, rows = cells([first, second])
    assert rows[1][4] == "1.00x~"
    assert "±" in rows[1][1]


def test_a_rung_far_off_both_its_neighbours_is_measured_again() -> None:
    assert is_far_off(1.0, [12.0, 11.0])
    assert is_far_off(120.0, [11.0])
    assert not is_far_off(1.0, [12.0, 9.0])
    assert not is_far_off(1.0, [])


def test_what_did_not_run_is_a_row_with_its_reason(go: Go) -> None:
    ends = iter([Outcome(status="out-of-memory", reason="because out-of-memory"), Outcome(status="refused"),
                 Outcome(status="timed-out"), Outcome(status="failed"), Outcome(status="killed")])
    run, _, _ = go(lambda job: next(ends, DONE), limit=10.0)
    shown = rung_results(run)
    assert [result.measured.status for result in shown[:6]] == [
        "out-of-memory", "refused", "timed-out", "failed", "killed", "done"]  # fmt: skip
    assert shown[0].measured.reason == "because out-of-memory"
    assert shown[5].speed is None  # its baseline did not run
    assert go(limit=10.0)[1].ran() == 2  # what failed or was killed is tried again
    assert go(limit=20.0)[1].ran() == 1  # what took too long, with more time


def test_another_machines_rows_are_not_taken_for_this_ones(go: Go) -> None:
    go()
    run, made, _ = go(lambda job: done(samples=8), CPU.model_copy(update={"device": "NVIDIA H200", "kind": "cuda"}))
    assert made.ran() == len(RUNGS)
    assert {result.measured.samples for result in rung_results(run)} == {8}
    assert any("also hold rows of CPU" in sentence for sentence in heading(run))


def test_what_cannot_serve_here_is_named_once_and_not_started(go: Go) -> None:
    runners = ("tightfit", "plain")
    run, made, said = go(machine=CPU.model_copy(update={"device": "NVIDIA T4", "kind": "cuda"}), runners=runners)
    refused = [result for result in rung_results(run) if result.measured.status == "refused"]
    assert refused
    assert all("compute capability" in result.measured.reason for result in refused)
    names = list(dict.fromkeys(result.rung.name for result in refused))
    assert f"{len(names)} rungs cannot run on NVIDIA T4, for the reasons below the table: {'; '.join(names)}" in said
    assert not [text for name in names for text in said if text.startswith(("rung", "pred")) and text.endswith(name)]
    assert {result.runner for result in refused} == set(runners)
    assert len(made.jobs) == 2 * made.predicted == 2 * (len(RUNGS) - len(names))
    (reason,) = {result.measured.reason for result in refused if result.rung.name == names[0]}
    assert [text for text in notes(rung_results(run)) if names[0] in text and reason in text] == [
        f"{'; '.join(result.name for result in refused if result.measured.reason == reason)}: refused: {reason}"]
    two = replace(LADDER, rungs=(LADDER.rungs[0], *(Rung(name=n, launch=n) for n in ("dp", "ddp", "ddp-no-p2p"))))
    assert "2 rungs cannot run on CPU, for the reasons below the table: dp; ddp-no-p2p" in go(ladder=two)[2]


def test_a_library_that_is_installed_since_is_tried_again_by_whom_it_serves(go: Go) -> None:
    missing = MissingLibrary("accelerate", "the Hugging Face Trainer")
    runners = ("tightfit", "hf-trainer")
    go(lambda job: DONE if job.runner == "tightfit" else Outcome(status="refused", reason=str(missing)),
       runners=runners)
    machine = CPU.model_copy(update={"versions": {**CPU.versions, "accelerate": "1.15"}})
    run, made, _ = go(machine=machine, runners=runners)
    assert all(result.speed == 1.0 for result in rung_results(run) if result.runner == "hf-trainer")
    assert [job.runner for job in made.jobs] == ["hf-trainer"] * len(RUNGS)
    assert go(machine=CPU.model_copy(update={"versions": {**CPU.versions, "flash-attn": "2.8"}}))[1].ran() == len(RUNGS)


@pytest.mark.parametrize(("changed", "anew"), [({"versions": {"torch": "2.14"}}, 2), ({"memory_bytes": 1 << 33}, 1)])
def test_another_machine_or_version_is_predicted_for_anew(go: Go, changed: dict[str, Any], anew: int) -> None:
    assert go(gpu="t4")[1].predicted == 2 * len(RUNGS)
    assert go(gpu="t4")[1].predicted == 0
    run, made, _ = go(machine=CPU.model_copy(update=changed), gpu="t4")
    assert made.predicted == anew * len(RUNGS)  # a card is what it was
    assert all(result.predicted and result.full for result in rung_results(run))


def test_a_rung_whose_prediction_hangs_costs_no_other_one_its_own(go: Go) -> None:
    run, _, said = go(hangs=(2, 5), limit=30.0)
    shown = rung_results(run)
    assert [number for number, result in enumerate(shown, start=1) if not result.predicted.fits] == [2, 5]
    missing = shown[1].predicted
    assert (missing.status, missing.limit) == ("timed-out", 30.0)
    assert "not predicted: took more than 30 seconds" in remarks(shown[1])
    assert f"  {RUNGS[1]} is not predicted: took more than 30 seconds" in said
    assert all(result.measured.status == "done" for result in shown)
    assert go(limit=30.0)[1].predicted == 0
    assert go(limit=60.0)[1].predicted == 2


def test_what_xla_compiles_is_predicted_for_no_processor(go: Go) -> None:
    ladder = ladders()["transformer-156m-jax"]
    _, made, _ = go(ladder=ladder, gpu="a5000")
    assert made.predicted == len(ladder.rungs)  # for that card alone
    card = Machine(device="RTX A5000", kind="cuda", memory_bytes=24 << 30)
    assert go(ladder=ladder, machine=card)[1].predicted == len(ladder.rungs)


def test_two_ladders_do_not_run_in_one_folder(go: Go, tmp_path: Path) -> None:
    source = ("import sys, time; from pathlib import Path; from tightfit.training.run_folder import locked\n"
              "with locked(Path(sys.argv[1])): print(flush=True); time.sleep(600)")
    other: Any = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE)
    with other.stdout:
        other.stdout.readline()
        with pytest.raises(RecipeError, match="output_dir: another run is using"):
            go()
        other.kill()
        other.wait()
    assert all(result.measured is not None for result in rung_results(go()[0]))


def test_lines_that_are_no_results_are_said_once(go: Go, tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("what is this\n" * 40)
    _, _, said = go()
    assert [text for text in said if "is no result" in text and text.endswith("; 39 more lines are none either")]


def test_a_peer_is_the_same_work_or_says_that_it_is_not(go: Go) -> None:
    losses = {"tightfit": (0.7,) * 5, "plain": (0.7, 0.7, 0.7, 0.7001, 0.7), "hf-trainer": (0.7, 0.7, 0.9, 0.7, 0.7)}
    run, _, _ = go(lambda job: done(losses=losses[job.runner]), runners=("tightfit", "plain", "hf-trainer"))
    shown = rung_results(run)
    assert [result.runner for result in shown[:3]] == ["tightfit", "plain", "hf-trainer"]
    assert (shown[1].other_work, shown[1].speed) == ("", 1.0)
    assert shown[2].other_work == "not the same work: at step 3 its loss is 0.9000, ours 0.7000"
    short = shown[2].measured.model_copy(update={"losses": (0.7,)})
    assert "1 steps, ours 5" in other_work(shown[0].measured, short)


def test_a_peers_loop_has_one_device(go: Go) -> None:
    ladder = replace(LADDER, rungs=(Rung(name="alone"), Rung(name="shared", launch="ddp")))
    _, made, said = go(ladder=ladder, runners=("tightfit", "plain"))
    assert [(job.runner, job.launch) for job in made.jobs] == [
        ("tightfit", "single"), ("plain", "single"), ("tightfit", "ddp")]
    assert said[0] == "resuming: 1 of 4 rungs have their row, or need none"
    assert made.predicted == 1


def test_data_that_is_read_for_longer_than_a_rung_may_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()

    def outlasts(jobs: Sequence[Job], limit: float) -> Iterator[Outcome]:
        limits.append(limit)
        yield Outcome(status="timed-out", reason=f"took more than {limit:.0f} seconds")

    monkeypatch.setattr(running, "run_jobs", outlasts)
    for limit in (1.0, 1200.0):
        with pytest.raises(RecipeError, match="data: reading it took more than"):
            this_machine(LADDER.recipe(LADDER.rungs[0]), limit)
    assert limits == [RUNG_SECONDS, 1200.0]  # a short one is a rung's alone


def test_a_wrong_override_is_said_before_anything_runs(go: Go, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="seq_length"):
        go(overrides=["seq_length=8"])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_sentence(go: Go, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="output_dir"):
        go(folder=tmp_path / "file")


@pytest.mark.parametrize(("word", "said"), [
    ("h2000", "write a size such as 24GB for a card that is not there; did you mean 'h200'"),
    ("2000GB", "gpu: '2000GB' should be at least 2GB and at most 1024GB"),
    ("v100", "write one of: v100-16gb, v100-32gb"),
])  # fmt: skip
def test_a_card_that_is_none_says_what_to_write(word: str, said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        card(word)
    assert said in str(raised.value)


def test_a_card_has_a_name_or_a_size() -> None:
    assert card("rtx-4090").device.name == "RTX 4090"
    assert 23 << 30 < card("24 GB").device.memory_bytes < 24 << 30


@pytest.mark.cold
def test_memory_falls_as_published(tmp_path: Path) -> None:
    """A few rungs of BERT-large's ladder as a person runs them, at its smallest: a process a rung."""
    kept = ("batch 4, fp32", "micro-batch 1, accumulation 4", "+ checkpointing")
    ladder = replace(LADDER, rungs=tuple(rung for rung in LADDER.rungs if rung.name in kept))
    said: list[str] = []
    run = ladder_run(ladder, "smallest", tmp_path, this_machine(ladder.recipe(ladder.rungs[0])), said.append, steps=1)
    run_rungs(run)
    peaks = {}
    for result in rung_results(run):
        assert result.measured.status == "done", result.measured
        assert result.predicted.peak_allocated == pytest.approx(result.measured.peak_allocated, rel=0.002), result.name
        peaks[result.name] = result.measured.peak_allocated
    assert len(peaks) == 3
    assert peaks["batch 4, fp32"] > peaks["micro-batch 1, accumulation 4"] > peaks["+ checkpointing"]
    assert any("rung 3 of 3" in sentence for sentence in said)
