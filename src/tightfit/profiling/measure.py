"""Profiling a recipe: a few real steps on its own data, measured, and the same step predicted."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.backends import load_backend
from tightfit.backends.base import Backend, Measurement
from tightfit.backends.measuring import measure
from tightfit.data.loading import WindowLoader
from tightfit.devices import Device
from tightfit.errors import OutOfMemory, RecipeError, TightfitError
from tightfit.files import replacing
from tightfit.planning.estimate import capacity, unseen
from tightfit.planning.plan import Plan
from tightfit.planning.search.resolve_auto import resolve_auto
from tightfit.planning.suggestions import smaller
from tightfit.planning.targets import Target, own_target
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import step_time
from tightfit.profiling import MEMORY_RECORD, XPLANE
from tightfit.profiling.profile import Profile, save
from tightfit.recipe import Recipe
from tightfit.system import installed
from tightfit.trace import Phase, Trace
from tightfit.training.progress import Listener
from tightfit.training.session import open_session

WINDOWS = 16
"""More windows than a measurement takes."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A recipe's steps, measured. recipe: resolved. plan: the plan that replaced `auto`; None where nothing was
    planned. notes: of the build."""

    recipe: Recipe
    device: Device
    backend: Backend
    measurement: Measurement
    plan: Plan | None
    notes: tuple[str, ...]


def profile_recipe(
    recipe: Recipe, module: Any = None, dataset: Any = None, *, listener: Listener | None = None,
    chrome_trace: Path | None = None, around: Callable[[Device], AbstractContextManager[Any]] = nullcontext,
) -> Profiled:  # fmt: skip
    """Build what training by the recipe would build, and measure a few of its steps on its own data. Nothing is kept
    of what they learn.

    module, dataset: as `Trainer` takes them. chrome_trace: where the profiler's own trace goes, gzipped, for Perfetto.
    around: entered while steps run, such as to watch the card.
    Raises the errors of `tightfit.errors`, as training does, and OSError where the trace cannot be written.
    """
    if recipe.mode != "train":
        raise RecipeError("mode: 'inference' is for planning, and a profile is of training; write mode=train")
    listener = listener or Listener()
    session = open_session(recipe, listener.message, module=module)
    session.check_memory(listener.message)
    recipe, device, backend = session.recipe, session.device, session.backend
    data = session.prepare(dataset, listener.preparing)
    build = session.build()
    step = backend.step(build)
    windows = step.windows(WindowLoader(data.train, recipe), 0, WINDOWS)
    listener.message("measuring: a few steps as they are, then one with every op followed")
    try:
        with around(device):
            measurement = measure(backend, step, windows, chrome_trace=chrome_trace)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}. Try: {'; or '.join(smaller(recipe, device))}") from None
    return Profiled(recipe=recipe, device=device, backend=backend, measurement=measurement, plan=session.plan,
                    notes=tuple(build.notes))


def prediction(backend: Backend, recipe: Recipe, device: Device, module: Any = None) -> dict[str, Any]:
    """The predicted fields of a Profile, for the recipe's step; only a note where it cannot be predicted."""
    target = own_target(device)
    try:
        return _predicted(backend.predict(recipe, target.device, module), recipe, target)
    except TightfitError as error:
        return {"notes": (f"not predicted: {error}",)}


def profile_of(
    recipe: Recipe, device: Device, measured: Measurement, predicted: Mapping[str, Any], *,
    notes: Sequence[str] = (), readings: Mapping[str, Sequence[float | None]] | None = None,
) -> Profile:  # fmt: skip
    """The profile of a measurement, with the fields that `prediction` gave. readings: of the card, while steps ran."""
    target = own_target(device)
    return Profile(
        recipe=recipe, device=target.device, measured=measured.trace, step_seconds=measured.step_seconds,
        phase_seconds=measured.phase_seconds, peak_bytes=measured.peak_bytes, overhead=measured.overhead,
        calibrated=target.ceilings is not None, versions=_versions(recipe),
        readings={name: tuple(series) for name, series in (readings or {}).items()},
        **{**predicted, "notes": tuple(dict.fromkeys([*notes, *predicted["notes"]]))},
    )  # fmt: skip


def predicted_profile(recipe: Recipe, target: Target, log: Callable[[str], None]) -> tuple[Profile, Plan | None]:
    """The profile of a recipe's step on a device that need not be there, predicted and not run; and the plan that
    replaced `auto`, None where nothing was planned. log: takes a sentence for the person running this.

    Raises the errors of `tightfit.errors`, as planning does.
    """
    if recipe.mode != "train":
        raise RecipeError("mode: 'inference' is for planning, and a profile is of training; write mode=train")
    backend = load_backend(recipe.backend.name)
    recipe, plan = resolve_auto(recipe, target, backend.predict, log)
    log(f"predicting a step on {target.device.name}")
    fields = _predicted(backend.predict(recipe, target.device), recipe, target)
    return Profile(recipe=recipe, device=target.device, step_seconds=0.0, calibrated=target.ceilings is not None,
                   versions=_versions(recipe), **fields), plan


def keep_profile(profile: Profile, measured: Measurement | None, folder: Path) -> Path:
    """Write what `tightfit report` reads into a run's folder, on CUDA `memory.pickle` for PyTorch's memory_viz, and
    JAX's own profile for xprof; the path of the profile's own folder. Each file is whole or not there. Raises OSError
    that names the file."""
    home = save(profile, folder)
    (home / XPLANE).unlink(missing_ok=True)  # of a profile before this one
    if measured is None:
        (folder / MEMORY_RECORD).unlink(missing_ok=True)
        return home
    if measured.xplane is not None:
        (home / XPLANE).parent.mkdir(parents=True, exist_ok=True)
        with replacing(home / XPLANE) as temporary:
            temporary.write_bytes(measured.xplane)
    if measured.memory_record is not None:
        with replacing(folder / MEMORY_RECORD) as temporary:
            temporary.write_bytes(pickle.dumps(measured.memory_record))
    return home


def _predicted(trace: Trace, recipe: Recipe, target: Target) -> dict[str, Any]:
    timed = step_time(trace, recipe, target.device, target.ceilings)
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    for op in trace.ops:
        op.seconds = op_seconds(op, target.device, target.ceilings, tf32=tf32)
    last = trace.last_step()
    assert last is not None, "a training step was predicted"
    return {
        "predicted": trace,
        "predicted_seconds": {
            Phase.DATA: timed.data, Phase.FORWARD: timed.forward, Phase.BACKWARD: timed.recompute + timed.backward,
            Phase.OPTIMIZER: timed.optimizer,
        },
        "predicted_peak_bytes": trace.peak(last.start, last.stop)[1] + unseen(trace, "allocator"),
        "capacity_bytes": capacity(trace, target.device),
        "notes": tuple(trace.notes),
    }  # fmt: skip


def _versions(recipe: Recipe) -> dict[str, str]:
    return installed((*recipe.backend.libraries, "tightfit"))
