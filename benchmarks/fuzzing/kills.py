"""Runs that are killed, four times each, as they prepare, step, evaluate, save or export: they end with the very
weights of runs that were not."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from fuzzing.harness import HANGS_AFTER, Kind, count
from fuzzing.runs import (
    PHASES,
    RUN,
    WAYS,
    Countdown,
    Moment,
    difference,
    in_child,
    killed_at,
    trained,
    write_text,
)

KILLS, TRIES = 4, 20
JAX_SHARE = 0.04
"""Of the runs: each takes ten times as long, for what it compiles."""


@cache
def warm() -> None:
    """Import what the runs share, by two of them; not JAX, whose threads no fork takes over."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("text", "adapter"):
            os.chdir(folder)
            write_text(Path(folder))
            trained({**RUN, **WAYS[name], "max_steps": 1, "output_dir": name})


def undisturbed(name: str, place: Path) -> tuple[float, int]:
    """How long a way's run takes that nothing befalls, in seconds, and how often it does something to a file. The run
    is made in `place` where none is there yet."""
    facts = place / f"{name}.json"
    if not facts.exists():
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).mkdir(parents=True)
        write_text(place / name)
        os.chdir(place / name)

        def work() -> None:
            counted = Countdown(0)
            sys.addaudithook(counted)
            began = time.monotonic()
            trained({**RUN, **WAYS[name]})
            facts.write_text(json.dumps((time.monotonic() - began, -counted.left)))

        if in_child(work, place / "said"):
            raise AssertionError((place / "said").read_text())
    seconds, events = json.loads(facts.read_text())
    return seconds, events


def moment(draw: random.Random, seconds: float, events: int) -> Moment:
    """When a run is killed that takes so long and does so much to files."""
    share, kind = draw.random() * draw.choice((0.3, 0.6, 1.0)), draw.randrange(3)
    if kind == 0:
        return Moment(1 + int(share * events))
    if kind == 1:
        return Moment(seconds=share * seconds)
    return Moment(draw.randint(1, 4), draw.choice((1e-5, 1e-3, 1e-2)) * (1 + draw.random()), draw.choice(PHASES[1:]))


def attempt(seed: int, folder: Path) -> str | None:
    """A way of training, killed at moments and places drawn from a seed."""
    warm()
    draw = random.Random(seed)
    name = "jax" if draw.random() < JAX_SHARE else draw.choice([name for name in WAYS if name != "jax"])
    seconds, events = undisturbed(name, folder.parent)
    os.chdir(folder)
    values = {**RUN, **WAYS[name]}
    write_text(folder)
    kills = 0
    for _ in range(TRIES):
        at = killed_at(values, moment(draw, seconds, events), folder / "said")
        if at is not None:
            kills += 1
            count(folder, f"{at}, {values.get('backend', 'pytorch')}")
        else:  # it is done: from the start again
            if wrong := difference(folder.parent / name / "run", folder / "run"):
                return f"{wrong}, in {name}"
            shutil.rmtree(folder / "run")
        if kills == KILLS:
            break
    code = in_child(lambda: trained(values), folder / "said")
    if code:
        return f"{name}: a run that was killed cannot go on: {(folder / 'said').read_text()}"
    wrong = difference(folder.parent / name / "run", folder / "run")
    return wrong and f"{wrong}, in {name}"


KIND = Kind(attempt, quick=3, chunk=8, seconds=3 * HANGS_AFTER)
