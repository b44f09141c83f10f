"""Predicting a ladder's rungs: one process for all of them, and another where a rung hangs or takes it along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tightfit.ladder.climbs import Climb
from tightfit.ladder.jobs import Outcome, Predict, Unpredicted
from tightfit.ladder.processes import run_job
from tightfit.ladder.rows import Predicted, read
from tightfit.ladder.rungs import Scale


def predict_rungs(climb: Climb, gpu: str | None, scale: Scale) -> None:
    """Predict the rungs that have no prediction yet, on this machine's device or on `gpu`.

    Each has the ladder's limit to itself. One that does not come to its end has a row that says why.
    """
    asked, device = climb.asked, gpu or climb.machine.device
    waiting = [rung for rung in asked.ladder.rungs
               if rung.launch == "single" and climb.is_due(climb.prediction(rung, device, scale))]
    every, where = len(waiting), f"for {device}, at full size" if gpu else f"for {device}"
    while waiting and asked.time_left > 0:
        limit, before = asked.time_left, len(climb.rows.predicted)
        rows = {rung.name: Predicted(ladder=asked.ladder.name, rung=rung.name, scale=scale, device=device, limit=limit,
                                     key=climb.prediction_key(rung, device, scale)) for rung in waiting}
        job = Predict(gpu=gpu, results=str(climb.path), memory=None if gpu else asked.memory, rungs=tuple(
            Unpredicted(row=rows[rung.name], recipe=climb.recipe(rung, scale).to_dict(),
                        within=climb.within(rung, scale)) for rung in waiting))
        titles = [f"predicting {number} of {every} {where}: {rung.name}"
                  for number, rung in enumerate(waiting, start=every - len(waiting) + 1)]
        found = run_job(job, limit, _progress(climb, titles), asked.until)
        climb.rows = read(climb.path)
        waiting = waiting[len(climb.rows.predicted) - before:]
        if waiting and asked.time_left > 0:
            _missed(climb, rows[waiting.pop(0).name], found)
    if waiting:
        climb.tell(f"the time is over: {len(waiting)} of {every} rungs are not predicted {where}")


def _progress(climb: Climb, titles: Sequence[str]) -> Callable[[], int]:
    """What counts the predictions that are done, and says the title of the one that is next."""
    before, said = _lines(climb.path), -1

    def count() -> int:
        nonlocal said
        done = _lines(climb.path) - before
        if said < done < len(titles):
            said = done
            climb.tell(titles[done])
        return done

    return count


def _lines(path: Path) -> int:
    """Lines of a file, one that was cut off included."""
    content = path.read_bytes() if path.exists() else b""
    return content.count(b"\n") + (content[-1:] not in (b"", b"\n"))


def _missed(climb: Climb, row: Predicted, found: Outcome) -> None:
    """Add the row of a rung whose process came to no prediction."""
    climb.add(replace(row, status=found.status if found.status != "done" else "failed", reason=found.reason,
                      date=datetime.now(UTC).isoformat(timespec="seconds"), versions=climb.machine.versions))
    climb.tell(f"  {row.rung} is not predicted: {found.reason}")
