"""What is planned for one case of `plan_vs_gpu.py`, and the memory that it is given: its limit.

Plain values, which JSON can hold. Bytes and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from gpu_cases import Aim, Case
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.calibration import Calibration
from tightfit.devices import MIB, Device
from tightfit.errors import TightfitError
from tightfit.planning.allocator.replay import Replay, replay
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.estimate import until
from tightfit.planning.timing.step_time import step_time
from tightfit.planning.timing.uncertainty import speed_error
from tightfit.recipe import Recipe
from tightfit.trace import Category, Trace, UntracedMemory

PHASES = ("forward", "backward", "optimizer", "evaluation")
CATEGORIES = ("weights", "gradients", "optimizer", "kept by forward")


class NoSuchLimit(Exception):
    """No limit serves what a case aims at."""


def predict_case(
    case: Case, recipe: Recipe, device: Device, calibration: Calibration | None, limit: int | None = None
) -> dict[str, Any]:
    """The prediction, or why there is none: `refused` where the case cannot run here, `failure` for a miss of ours.

    limit: what the case was measured with; None chooses it.
    """
    began = time.perf_counter()
    refusals = recipe.refusals(device)
    if refusals:
        return {"refused": "; ".join(refusals)}
    try:
        trace = without_resuming(PytorchBackend().predict(recipe, device))
        values = predicted(trace, case, device, limit)
        times = {"uncalibrated": step_time(trace, recipe, device),
                 "calibrated": None if calibration is None else step_time(trace, recipe, device, calibration)}
        values["step_seconds"] = {name: time and time.seconds for name, time in times.items()}
        values["speed_error"] = {
            name: time and speed_error(time.work, device, time.calibrated, time.slower_host)
            for name, time in times.items()}
    except NoSuchLimit as reason:
        return {"refused": str(reason)}
    except TightfitError as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {**values, "notes": trace.notes, "torch": torch.__version__, "seconds": time.perf_counter() - began}


def predicted(trace: Trace, case: Case, device: Device, limit: int | None = None) -> dict[str, Any]:
    """The prediction's memory. Raises NoSuchLimit."""
    values: dict[str, Any] = {
        "untraced": [{"name": u.name, "bytes": u.bytes, "where": u.where} for u in trace.untraced],
        "context": _bytes(trace.untraced, "context"), "categories": categories(trace),
    }
    if device.kind == "cpu":
        spans = {name: [trace.peak(s.start, s.stop)[1] for s in trace.spans if s.name == name] for name in PHASES}
        peaks = {name: max(found) for name, found in spans.items() if found}
        return {**values, "limit": None, "fits": "yes", "peak_allocated": trace.peak()[1], "phases": peaks}
    settings = AllocatorSettings(expandable_segments=case.expandable)
    capacity = device.memory_bytes - values["context"]
    if limit is None:
        limit, found = limit_for(trace, case.aim, capacity, settings)
    else:
        found = replay(trace, capacity, settings, limit=limit)
    return {
        **values, "limit": limit, "fits": found.fits, "retries": len(found.retries), "missing": found.missing,
        "peak_allocated": found.peak_allocated, "peak_reserved": found.peak_reserved,
        "phases": phase_peaks(trace, found),
    }


def limit_for(trace: Trace, aim: Aim, capacity: int, settings: AllocatorSettings) -> tuple[int, Replay]:
    """The bytes that the allocator may reserve so that the prediction is what is aimed at, and the prediction.

    capacity: what the device has for the allocator. Raises NoSuchLimit.
    """
    free = replay(trace, None, settings)
    if free.peak_allocated > capacity:
        raise NoSuchLimit(f"needs {free.peak_allocated / 2**30:.1f} GiB, and the device has {capacity / 2**30:.1f}")
    if aim.kind == "fill":
        limit = min(round(free.peak_reserved * 100 / aim.percent), capacity)
        return limit, replay(trace, capacity, settings, limit=limit)
    low = least_limit(trace, free, settings)
    if aim.kind == "short":
        limit = round(low / (1 + aim.percent / 100))
        return limit, replay(trace, capacity, settings, limit=limit)
    for share in (0.5, 0.75, 0.25, 0.0):
        limit = round(low + share * (free.peak_reserved - low))
        found = replay(trace, capacity, settings, limit=limit)
        if found.fits == "with-retries":
            return limit, found
    raise NoSuchLimit("no limit makes the allocator release cached memory and go on: it fits at once, or not at all")


def least_limit(trace: Trace, free: Replay, settings: AllocatorSettings) -> int:
    """The smallest limit that serves, cached memory released where needed, to 2 MiB."""
    fails, serves = free.peak_allocated - 2 * MIB, free.peak_reserved
    while serves - fails > 2 * MIB:
        middle = (fails + serves) // 2
        if replay(trace, None, settings, limit=middle).fits == "no":
            fails = middle
        else:
            serves = middle
    return serves


def phase_peaks(trace: Trace, found: Replay) -> dict[str, int]:
    """The most that is allocated at once in each phase of the two steps, as the allocator counts it."""
    peaks: dict[str, int] = {}
    for span in trace.spans:
        if span.name in PHASES:
            inside = (found.ticks >= span.start) & (found.ticks < span.stop)
            most = max([held(found, span.start), *map(int, found.allocated[inside])])
            peaks[span.name] = max(peaks.get(span.name, 0), most)
    return peaks


def held(found: Replay, tick: int) -> int:
    """Bytes allocated as a tick begins."""
    before = int((found.ticks < tick).sum())
    return int(found.allocated[before - 1]) if before else 0


def categories(trace: Trace) -> dict[str, int]:
    """What the second step's optimizer finds of weights and gradients, and leaves of its states; and what the forward
    pass of its first micro-batch keeps. Bytes asked for."""
    second = [span for span in trace.spans if span.step == 2]
    forward, optimizer = (next(s for s in second if s.name == name) for name in ("forward", "optimizer"))
    found, left = trace.by_category(optimizer.start), trace.by_category(optimizer.stop)
    kept = sum(a.bytes for a in trace.allocations
               if forward.start <= a.born < forward.stop and (a.died is None or a.died >= forward.stop))
    figures = (found[Category.WEIGHTS], found[Category.GRADIENTS], left[Category.OPTIMIZER], kept)
    return dict(zip(CATEGORIES, figures, strict=True))


def without_resuming(trace: Trace) -> Trace:
    """The trace up to where going on from a checkpoint begins, which is not measured."""
    starts = [span.start for span in trace.spans if span.name == "resume"]
    return until(trace, min(starts)) if starts else trace


def _bytes(figures: list[UntracedMemory], where: str) -> int:
    return sum(figure.bytes for figure in figures if figure.where == where)


def device_of(facts: Mapping[str, Any]) -> Device:
    """The device that a row was measured on, with the figures that are known of it."""
    from tightfit.planning.targets import with_figures

    own = Device(
        kind=facts["kind"], name=facts["name"], memory_bytes=facts["memory_bytes"], units=facts["units"],
        capability=None if facts["capability"] is None else tuple(facts["capability"]),
    )
    return own if own.kind == "cpu" else with_figures(own)
