"""Ladders that were run, made without running anything, and a stand-in for the processes of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tightfit.ladder import run as running
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.jobs import Job, Outcome
from tightfit.ladder.rows import OURS, Machine, Measured, Predicted, Status
from tightfit.ladder.run import LadderRun, Log
from tightfit.ladder.rungs import STEPS_OF_SCALE, Ladder, Rung, Scale

MIB = 2**20
CPU = Machine(device="CPU", kind="cpu", memory_bytes=1 << 34, units=2, versions={"torch": "2.13", "transformers": "5"})
CARD = Machine(device="V100 16 GB", kind="cuda", memory_bytes=1 << 34, units=80, driver="580.1",
               versions={"torch": "2.13"})  # fmt: skip
PEER = "hf-trainer"
REFUSED = "pure bf16, 8-bit AdamW, SDPA, compiled"
STRANGE = "batch 4, SDPA"
"""The rung of BERT-large's ladder that was refused, and the one that the peer did not do the same work on."""
EVIL = "<script>alert(1)</script>"
EVILS = (EVIL, "</script><img src=x onerror=alert(2)>", '" onmouseover="alert(3)', "%{x} <b>bold</b> &amp; 'q'")

FIGURES: dict[str, Any] = {
    "recipe": {}, "seconds": (0.2, 0.2, 0.2), "losses": (0.7, 0.6, 0.5, 0.4, 0.3), "samples": 4, "tokens": 512,
    "peak_allocated": 100, "peak_reserved": 200, "context": None,
}  # fmt: skip
DONE = Outcome(values=FIGURES)


def done(**values: Any) -> Outcome:
    return Outcome(values={**FIGURES, **values})


class Processes:
    """Stands in for the processes: each job's outcome, and which jobs there were.

    hangs: places of predictions that take their process along, once for each time that a place stands here.
    """

    def __init__(self, outcome: Callable[[Job], Outcome], machine: Machine = CPU, hangs: Sequence[int] = ()) -> None:
        self.outcome, self.machine, self.jobs, self.hangs = outcome, machine, list[Job](), list(hangs)
        self.predicted = 0

    def __call__(self, jobs: Sequence[Job], limit: float) -> Iterator[Outcome]:
        for job in jobs:
            match job.kind:
                case "machine":
                    yield Outcome(values=self.machine.model_dump())
                case "measure":
                    self.jobs.append(job)
                    yield self.outcome(job)
                case "predict":
                    self.predicted += 1
                    if self.predicted in self.hangs:
                        yield Outcome(status="timed-out", reason=f"took more than {limit:.0f} seconds")
                        return
                    yield Outcome(values={"fits": "yes", "peak_reserved": 190})

    def ran(self) -> int:
        count = len(self.jobs)
        self.jobs.clear()
        return count


def use(monkeypatch: pytest.MonkeyPatch, made: Processes) -> Processes:
    """Let the stand-in take the place of every process that a ladder starts."""
    monkeypatch.setattr(running, "run_jobs", made)
    return made


def ladder_run(ladder: Ladder, scale: Scale, folder: Path, machine: Machine = CPU, log: Log = lambda text: None,
               **asked: Any) -> LadderRun:  # fmt: skip
    """A ladder's run, with the scale's own steps where none are given."""
    warm_up, steps = STEPS_OF_SCALE[scale]
    return LadderRun(**{"ladder": ladder, "scale": scale, "folder": folder, "machine": machine, "log": log,
                        "warm_up": warm_up, "steps": steps, "limit": 300.0, **asked})


def empty(ladder: Ladder, scale: Scale, machine: Machine = CPU, **asked: Any) -> LadderRun:
    """A ladder that has no row yet."""
    return ladder_run(ladder, scale, Path("gone"), machine, **asked)


def measured(run: LadderRun, rung: Rung, seconds: float, mib: float, runner: str = OURS, **values: Any) -> Measured:
    """A rung of 4 samples that took so long and so much; keyed as the run looks it up."""
    found = {
        "recipe": run.recipe(rung).to_dict(), "date": "2026-11-21T10:00:00+00:00", "commit": "abc1234",
        "seconds": (seconds * 1.1, seconds, seconds * 0.9), "samples": 4, "tokens": 512, "losses": (0.7, 0.6, 0.5),
        "peak_allocated": int(mib * MIB), "peak_reserved": int(mib * MIB),
        "context": 100 * MIB if run.machine.kind == "cuda" else None, **values,
    }  # fmt: skip
    return Measured(ladder=run.ladder.name, rung=rung.name, runner=runner, scale=run.scale,
                    key=run.key(rung, runner), machine=run.machine, **found)


def without_figures(row: Measured, status: Status, reason: str) -> Measured:
    """The row of a rung that did not run."""
    return row.model_copy(update={"status": status, "reason": reason, "seconds": (), "losses": (), "samples": 0,
                                  "peak_allocated": 0, "peak_reserved": 0})


def predicted(run: LadderRun, rung: Rung, device: str, scale: Scale, seconds: float, mib: float,
              **values: Any) -> Predicted:  # fmt: skip
    found = {"fits": "yes", "step_seconds": seconds, "samples": 4, "peak_allocated": int(mib * MIB),
             "peak_reserved": int(mib * MIB), **values}
    return Predicted(ladder=run.ladder.name, rung=rung.name, scale=scale, device=device,
                     key=run.predicted_key(rung, device, scale), **found)


def bert_large(scale: Scale = "reduced", machine: Machine = CPU, gpu: str | None = "v100-16gb") -> LadderRun:
    """BERT-large's ladder with a peer: rung n takes n tenths of a second and 160 / n MiB; one rung is refused, the last
    has not run, and on one the peer's losses are others."""
    run = empty(ladders()["bert-large"], scale, machine, runners=(OURS, PEER), gpu=gpu)
    for number, rung in enumerate(run.ladder.rungs[:-1], start=1):
        row = measured(run, rung, number / 10, 160 / number)
        if rung.name == REFUSED:
            row = without_figures(row, "refused", "too new")
        guess = predicted(run, rung, machine.device, scale, number / 20, 150 / number, notes=("a rough guess",))
        run.rows.measured.append(row)
        run.rows.predicted.append(guess)
        if gpu is not None:
            run.rows.predicted.append(
                predicted(run, rung, gpu, "full", 0.5, 8_000, fits="yes" if number > 1 else "no"))
        if number <= 10:
            losses = (0.7, 0.9, 0.5) if rung.name == STRANGE else row.losses
            run.rows.measured.append(measured(run, rung, 2 * number / 10, 320 / number, PEER, losses=losses))
    return run


def hostile() -> LadderRun:
    """A ladder whose every name, reason and note is markup."""
    base = dict(ladders()["bert-large"].base)
    ladder = Ladder(name=EVIL, title=EVIL, base=base, published_on=EVIL, notes=tuple(EVILS), rungs=(
        Rung(name=EVIL, note=EVIL), Rung(name=EVILS[1], against=EVIL, feature="SDPA", changes={"attention": "sdpa"}),
        Rung(name=EVILS[2], against=EVIL, changes={"precision": "bf16"})))  # fmt: skip
    machine = CPU.model_copy(update={"device": EVIL, "versions": {EVIL: EVIL}})
    run = empty(ladder, "full", machine, runners=(OURS, EVIL), gpu=EVIL)
    first, second, third = ladder.rungs
    run.rows.measured += [
        measured(run, first, 0.1, 100, notes=(EVIL,), commit=EVIL, date=EVIL), measured(run, second, 0.2, 50),
        measured(run, first, 0.2, 100, EVIL, losses=(9.0, 9.0, 9.0)),
        without_figures(measured(run, third, 0.2, 50), "failed", EVIL),
    ]  # fmt: skip
    run.rows.predicted += [predicted(run, first, EVIL, "full", 0.1, 90, notes=(EVIL,)),
                           predicted(run, second, EVIL, "full", 0.1, 90, fits="", reason=EVIL)]  # fmt: skip
    run.rows.skipped.append(EVIL)
    return run
