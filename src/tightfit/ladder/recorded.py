"""A ladder read back from its results, to be drawn again without running anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from tightfit.errors import ReportError
from tightfit.ladder import LIMIT
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.climbs import Asked, Climb
from tightfit.ladder.rows import OURS, Rows, read
from tightfit.ladder.rungs import STEPS, Scale


def recorded(path: Path) -> Climb:
    """The last ladder of a results file: of the machine and the scale that its last measurement has.

    Rows are found by the names of their rungs. Their keys are of the day on which they were measured, and a recipe may
    have other fields since. Raises ReportError where nothing in the file was measured, RecipeError where its ladder has
    no name any more.
    """
    rows = read(path)
    if not rows.measured:
        raise ReportError(f"{path}: holds no rung that was measured; write a results.jsonl of tightfit ladder")
    last = rows.measured[-1]
    ladder, scale = find_ladder(last.ladder), cast(Scale, last.scale)
    names = {rung.name for rung in ladder.rungs}
    measured = [row for row in rows.measured
                if (row.ladder, row.scale) == (last.ladder, last.scale) and row.rung in names]
    predicted = [row for row in rows.predicted if row.ladder == last.ladder and row.rung in names]
    gpu = next((row.device for row in reversed(predicted) if row.scale == "full" and row.device != last.machine.device),
               None)
    runners = dict.fromkeys([OURS, *(row.runner for row in measured)])
    warm_up, steps = STEPS[scale]
    asked = Asked(ladder=ladder, scale=scale, folder=path.parent, warm_up=warm_up, steps=steps, limit=LIMIT,
                  runners=tuple(runners), gpu=gpu)
    climb = Climb(asked, last.machine, Rows(), lambda text: None)
    climb.rows = Rows(
        measured=[replace(row, key=climb.key(ladder.rung(row.rung), row.runner)) for row in measured],
        predicted=[replace(row, key=climb.prediction_key(ladder.rung(row.rung), row.device, cast(Scale, row.scale)))
                   for row in predicted],
        skipped=rows.skipped,
    )  # fmt: skip
    return climb
