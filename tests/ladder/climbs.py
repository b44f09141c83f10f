"""Ladders that were climbed, made without running anything, and a stand-in for the processes that climb one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.profiling.profiled import EVIL, EVILS
from tightfit.ladder import climbing, predicting
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.climbs import Asked, Climb
from tightfit.ladder.jobs import About, Figures, Job, Measure, Outcome, Predict
from tightfit.ladder.rows import OURS, Machine, Measured, Predicted, Rows, Status, append
from tightfit.ladder.rungs import STEPS, Ladder, Rung, Scale

MIB = 2**20
CPU = Machine(device="CPU", kind="cpu", memory_bytes=1 << 34, units=2, versions={"torch": "2.13", "transformers": "5"})
CARD = Machine(device="V100 16 GB", kind="cuda", memory_bytes=1 << 34, units=80, driver="580.1",
               versions={"torch": "2.13"})  # fmt: skip
PEER = "hf-trainer"
REFUSED = "pure bf16, 8-bit AdamW, SDPA, compiled"
STRANGE = "batch 4, SDPA"
"""The rung of BERT-large's ladder that was refused, and the one that the peer did not do the same work on."""


FIGURES = Figures(recipe={}, seconds=(0.2, 0.1, 0.3), losses=(0.7, 0.6, 0.5, 0.4, 0.3), samples=4, tokens=512,
                  peak_allocated=100, peak_reserved=200, context=None)
DONE = Outcome(figures=FIGURES)


class Processes:
    """Stands in for the processes: what each rung comes to, and which were asked for.

    hangs: names of rungs whose prediction takes its process along, once for each time that a name stands here.
    """

    def __init__(
        self, outcome: Callable[[Measure], Outcome], machine: Machine = CPU, hangs: Sequence[str] = ()
    ) -> None:
        self.outcome, self.machine, self.jobs = outcome, machine, list[Measure]()
        self.hangs, self.foretold = list(hangs), list[str]()

    def __call__(self, job: Job, limit: float, progress: Callable[[], int] = lambda: 0,
                 until: float | None = None) -> Outcome:  # fmt: skip
        match job:
            case About():
                return Outcome(machine=self.machine)
            case Predict():
                for rung in job.rungs:
                    progress()
                    if rung.row.rung in self.hangs:
                        self.hangs.remove(rung.row.rung)
                        return Outcome(status="timed-out", reason=f"took more than {limit:.0f} seconds")
                    append(Path(job.results), replace(rung.row, fits="yes", peak_reserved=190))
                    self.foretold.append(rung.row.rung)
                return Outcome()
        self.jobs.append(job)
        return self.outcome(job)

    def ran(self) -> int:
        count = len(self.jobs)
        self.jobs.clear()
        return count


def use(monkeypatch: pytest.MonkeyPatch, made: Processes) -> Processes:
    """Let the stand-in take the place of every process that a climb starts."""
    for module in (climbing, predicting):
        monkeypatch.setattr(module, "run_job", made)
    return made


def how(ladder: Ladder, scale: Scale, folder: Path, **asked: Any) -> Asked:
    """A ladder to be climbed, with the scale's own steps where none are given."""
    warm_up, steps = STEPS[scale]
    return Asked(**{"ladder": ladder, "scale": scale, "folder": folder, "warm_up": warm_up, "steps": steps,
                    "limit": 300.0, **asked})


def empty(ladder: Ladder, scale: Scale, machine: Machine = CPU, **asked: Any) -> Climb:
    """A ladder that has no row yet."""
    return Climb(how(ladder, scale, Path("gone"), **asked), machine, Rows(), lambda text: None)


def measured(climb: Climb, rung: Rung, seconds: float, mib: float, runner: str = OURS, **values: Any) -> Measured:
    """A rung of 4 samples that took so long and so much; keyed as the climb looks it up."""
    found = {
        "status": "done", "recipe": climb.recipe(rung).to_dict(), "date": "2026-11-21T10:00:00+00:00",
        "commit": "abc1234", "seconds": (seconds * 1.1, seconds, seconds * 0.9), "samples": 4, "tokens": 512,
        "losses": (0.7, 0.6, 0.5), "peak_allocated": int(mib * MIB), "peak_reserved": int(mib * MIB),
        "context": 100 * MIB if climb.machine.kind == "cuda" else None, **values,
    }  # fmt: skip
    return Measured(ladder=climb.asked.ladder.name, rung=rung.name, runner=runner, scale=climb.asked.scale,
                    key=climb.key(rung, runner), machine=climb.machine, **found)


def without_figures(row: Measured, status: Status, reason: str) -> Measured:
    """The row of a rung that did not run."""
    return replace(row, status=status, reason=reason, seconds=(), losses=(), samples=0, peak_allocated=0,
                   peak_reserved=0)


def predicted(climb: Climb, rung: Rung, device: str, scale: Scale, seconds: float, mib: float,
              **values: Any) -> Predicted:  # fmt: skip
    found = {"fits": "yes", "step_seconds": seconds, "samples": 4, "peak_allocated": int(mib * MIB),
             "peak_reserved": int(mib * MIB), **values}
    return Predicted(ladder=climb.asked.ladder.name, rung=rung.name, scale=scale, device=device,
                     key=climb.prediction_key(rung, device, scale), **found)


def climbed(scale: Scale = "reduced", machine: Machine = CPU, gpu: str | None = "v100-16gb") -> Climb:
    """BERT-large's ladder with a peer: rung n takes n tenths of a second and 160 / n MiB; one rung is refused, the last
    has not run, and on one the peer's losses are others."""
    climb = empty(find_ladder("bert-large"), scale, machine, runners=(OURS, PEER), gpu=gpu)
    for number, rung in enumerate(climb.asked.ladder.rungs[:-1], start=1):
        row = measured(climb, rung, number / 10, 160 / number)
        if rung.name == REFUSED:
            row = without_figures(row, "refused", "too new")
        guess = predicted(climb, rung, machine.device, scale, number / 20, 150 / number, notes=("a rough guess",))
        climb.rows.measured.append(row)
        climb.rows.predicted.append(guess)
        if gpu is not None:
            far = predicted(climb, rung, gpu, "full", 0.5, 8_000)
            climb.rows.predicted.append(far if number > 1 else replace(far, fits="no"))
        if number <= 10:
            losses = (0.7, 0.9, 0.5) if rung.name == STRANGE else row.losses
            climb.rows.measured.append(
                measured(climb, rung, 2 * number / 10, 320 / number, PEER, losses=losses))
    return climb


def hostile() -> Climb:
    """A ladder whose every name, reason and note is markup."""
    base = dict(find_ladder("bert-large").base)
    ladder = Ladder(name=EVIL, title=EVIL, base=base, published_on=EVIL, notes=tuple(EVILS), rungs=(
        Rung(name=EVIL, note=EVIL), Rung(name=EVILS[1], against=EVIL, feature="SDPA", changes={"attention": "sdpa"}),
        Rung(name=EVILS[2], against=EVIL, changes={"precision": "bf16"})))  # fmt: skip
    machine = replace(CPU, device=EVIL, versions={EVIL: EVIL})
    climb = empty(ladder, "full", machine, runners=(OURS, EVIL), gpu=EVIL)
    first, second, third = ladder.rungs
    climb.rows.measured += [
        measured(climb, first, 0.1, 100, notes=(EVIL,), commit=EVIL, date=EVIL), measured(climb, second, 0.2, 50),
        measured(climb, first, 0.2, 100, EVIL, losses=(9.0, 9.0, 9.0)),
        without_figures(measured(climb, third, 0.2, 50), "failed", EVIL),
    ]  # fmt: skip
    climb.rows.predicted += [predicted(climb, first, EVIL, "full", 0.1, 90, notes=(EVIL,)),
                             predicted(climb, second, EVIL, "full", 0.1, 90, fits="", reason=EVIL)]  # fmt: skip
    climb.rows.skipped.append(EVIL)
    return climb
