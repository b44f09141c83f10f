"""Profiling a recipe: a few real steps on its own data, or one of a training run, measured; the same step predicted.

What a run learns is the same without its profile: the step is followed, not changed. Whatever fails there is one line.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

from tightfit.backends import backend_of
from tightfit.backends.base import TIMED_STEPS, WARM_UP, PendingResult, Step, StepProfiler
from tightfit.backends.measurements import Measurement
from tightfit.backends.measuring import measure
from tightfit.data.loading import GlobalBatchLoader
from tightfit.errors import OutOfMemory, RecipeError
from tightfit.files import replacing
from tightfit.nvml import Series, watched
from tightfit.planning.estimate import Tools, capacity, estimate
from tightfit.planning.plan import Plan
from tightfit.planning.resolve_auto import resolve_auto
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.suggestions import with_suggestions
from tightfit.planning.targets import Target, own_target
from tightfit.planning.timing.op_times import lasting_seconds
from tightfit.planning.timing.step_time import step_lanes
from tightfit.profiling import CHROME_TRACE, MEMORY_RECORD, XPLANE
from tightfit.profiling.profile import NOT_PREDICTED, Profile, save
from tightfit.recipe import Recipe
from tightfit.system import installed
from tightfit.trace import Phase, Place
from tightfit.training.listeners import Listener
from tightfit.training.session import Session, open_session

GLOBAL_BATCHES = 2 * (WARM_UP + TIMED_STEPS + 1)
"""Global batches that there are for a measurement: enough where every other one is an epoch's short last one."""


def profile_recipe(
    recipe: Recipe, *, listener: Listener | None = None, chrome_trace: Path | None = None
) -> tuple[Profile, Measurement, Plan | None]:
    """Build what training by the recipe would build, measure a few of its steps on its own data, and predict the same
    step. Nothing is kept of what they learn. The plan is the one that replaced `auto`; None where nothing was planned.

    chrome_trace: where the profiler's own trace goes, gzipped, for Perfetto.
    Raises the errors of `tightfit.errors`, as training does, and OSError where the trace cannot be written.
    """
    _check_trains(recipe)
    listener = listener or Listener()
    session = open_session(recipe, listener.message)
    session.check_memory(listener.message)
    recipe, device, backend = session.recipe, session.device, session.backend
    data = session.prepare(progress=listener.preparing)
    build = session.build()
    step = backend.step(build)
    global_batches, tokens = step.global_batches(GlobalBatchLoader(data.train, recipe), 0, GLOBAL_BATCHES), list[int]()

    def counted() -> Iterator[Any]:
        for global_batch in global_batches:
            if global_batch.samples == recipe.batch_size:
                tokens.append(global_batch.tokens)
                yield global_batch

    listener.message("measuring: a few steps as they are, then one with every op followed")
    try:
        with watched(device.uuid) as readings:
            measured = measure(backend, step, counted(), chrome_trace=chrome_trace)
    except OutOfMemory as error:
        raise with_suggestions(error, recipe, device) from None
    listener.message("predicting the same step")
    profile = profile_of(session, measured, prediction(session), fmean(tokens[WARM_UP:]), build.notes, readings)
    return profile, measured, session.plan


def prediction(session: Session) -> dict[str, Any]:
    """The predicted fields of a Profile, for the recipe's step; only a note where it cannot be predicted."""
    target = own_target(session.device)
    try:
        return _predicted(session.recipe, target, standard_tools(session.backend, target.calibration, session.module))
    except Exception as error:  # what was measured stands without it, and a model of one's own may fail in any way
        return {"notes": (NOT_PREDICTED + _sentence(error),)}


def profile_of(
    session: Session, measured: Measurement, predicted: Mapping[str, Any], tokens: float, notes: Sequence[str],
    readings: Series,
) -> Profile:  # fmt: skip
    """The profile of a measurement, with the fields that `prediction` gave. tokens: of a step, as of a Profile.
    readings: of the card, while steps ran."""
    recipe, target = session.recipe, own_target(session.device)
    offloads = bool(measured.trace.lying_in(Place.HOST)) and bool(measured.lanes)
    lanes = {**({"measured": measured.lanes} if offloads else {}), **predicted.get("lanes", {})}
    room = capacity(measured.trace, target.device)
    kept = dict.fromkeys([*notes, *predicted["notes"]])
    return Profile(
        recipe=recipe, device=target.device, measured=measured.trace, step_seconds=measured.step_seconds, tokens=tokens,
        phase_seconds=measured.phase_seconds, peak_bytes=measured.peak_bytes, overhead=measured.overhead,
        calibrated=target.calibration is not None, versions=installed((*recipe.backend.libraries, "tightfit")),
        readings={name: tuple(series) for name, series in readings.items()},
        **{"capacity_bytes": room, **predicted, "lanes": lanes, "notes": tuple(kept)},
    )  # fmt: skip


def predicted_profile(recipe: Recipe, target: Target, log: Callable[[str], None]) -> tuple[Profile, Plan | None]:
    """The profile of a recipe's step on a device that need not be present, predicted and not run; and the plan that
    replaced `auto`, None where nothing was planned. log: takes a sentence for the person running this.

    Raises the errors of `tightfit.errors`, as planning does.
    """
    _check_trains(recipe)
    backend = backend_of(recipe)
    recipe, plan = resolve_auto(recipe, target, backend, log)
    log(f"predicting a step of {recipe.model} on {target.device.name}")
    fields = _predicted(recipe, target, standard_tools(backend, target.calibration))
    return Profile(recipe=recipe, device=target.device, step_seconds=0.0, calibrated=target.calibration is not None,
                   versions=installed((*recipe.backend.libraries, "tightfit")), **fields), plan


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


def profiled_step(recipe: Recipe, first_step: int, source: GlobalBatchLoader) -> int | None:
    """The step to profile of a run, or of one that goes on behind `first_step`; None for none.

    It is `profile_step`, but in no process one of the first, which warm up or are timed as they are, and not one on an
    epoch's short last global batch.
    """
    if recipe.profile_step is None or first_step >= recipe.profile_step:
        return None
    at = max(recipe.profile_step, first_step + WARM_UP + 2)
    at += not source.is_whole(at - 1)
    return at if at <= recipe.max_steps else None


def profile_of_run(
    session: Session, folder: Path, first_step: int, source: GlobalBatchLoader, listener: Listener
) -> RunProfile | None:
    """The profile of the step that `profile_step` names, in a run that goes on behind `first_step`; None where no such
    step is still to come."""
    recipe = session.recipe
    at = profiled_step(recipe, first_step, source)
    if at is not None:
        return RunProfile(at, session, folder, listener)
    if recipe.profile_step is not None and recipe.profile_step > first_step:
        listener.message(f"profile_step: no step from {recipe.profile_step} on comes before max_steps "
                         f"{recipe.max_steps} that has warmed up; none is profiled")
    return None


class RunProfile:
    """Profiles step `at`, and by the clock times those before it.

    To be made before the run's step is built: predicting drops what was compiled, and draws weights.
    """

    def __init__(self, at: int, session: Session, folder: Path, listener: Listener) -> None:
        self.at = at
        self._session, self._folder, self._listener = session, folder, listener
        self._profiler: StepProfiler | None = None
        self._timed = range(0)
        self._notes: tuple[str, ...] = ()
        self._tokens = 0
        listener.message(f"predicting a step, to compare step {at} with")
        self._predicted = prediction(session)
        if "predicted" not in self._predicted:
            listener.message(f"{self._predicted['notes'][0]}; step {at} is measured all the same")

    def begin(self, step: Step, first_step: int, notes: tuple[str, ...] = ()) -> None:
        """The run's step is there, and the run goes on behind `first_step`. notes: of its build."""
        self._profiler = self._session.backend.step_profiler(step)
        self._timed = range(max(first_step + WARM_UP + 1, self.at - TIMED_STEPS), self.at)
        self._notes = notes

    def timed(self, number: int) -> AbstractContextManager[None]:
        """Context that times a step of the run, its wait for a global batch included."""
        if self._profiler is None or number not in self._timed:
            return nullcontext()
        return self._profiler.timed()

    def take(self, global_batch: Any, learning_rate: float) -> PendingResult:
        assert self._profiler is not None
        self._tokens = global_batch.tokens
        return self._profiler.profiled(global_batch, learning_rate)

    def keep(self) -> None:
        """Write the profile into the run's folder, with a message; a warning where that fails."""
        assert self._profiler is not None
        try:
            measured = self._profiler.measurement(self._folder / CHROME_TRACE)
            notes = (f"step {self.at} of a training run", *self._notes)
            found = profile_of(self._session, measured, self._predicted, self._tokens, notes, {})
            keep_profile(found, measured, self._folder)
        except Exception as error:  # the run is worth more than its profile
            self._listener.message(f"warning: step {self.at} has no profile, and the run continues: {_sentence(error)}")
        else:
            self._listener.message(f"profiled step {self.at}; to draw it: tightfit report {self._folder}")
        self._profiler = None  # and all that was recorded


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: cannot be written ({error.strerror})"
    return " ".join(str(error).split()) or type(error).__name__


def _predicted(recipe: Recipe, target: Target, tools: Tools) -> dict[str, Any]:
    trace = tools.predict(recipe, target.device)
    timed = tools.step_time(trace, recipe, target.device)
    # Memory that the allocator takes again, between steps or where it runs short: of the next pass.
    again = estimate(trace, recipe, target.device, tools).time.step_seconds - timed.seconds
    for op in trace.ops:
        op.seconds = lasting_seconds(op, target.device, target.calibration, tf32=recipe.tf32)
    last = trace.last_step()
    assert last is not None, "a training step was predicted"
    return {
        "predicted": trace,
        "predicted_seconds": {
            Phase.DATA: timed.data, Phase.FORWARD: timed.forward + again,
            Phase.BACKWARD: timed.recompute + timed.backward, Phase.OPTIMIZER: timed.optimizer,
        },
        "predicted_peak_bytes": trace.peak(last.start, last.stop)[1] + trace.untraced_bytes("allocator"),
        "capacity_bytes": capacity(trace, target.device),
        "lanes": {"predicted": step_lanes(trace, recipe, target.device, target.calibration)} if timed.copies else {},
        "notes": tuple(trace.notes),
    }  # fmt: skip


def _check_trains(recipe: Recipe) -> None:
    if recipe.mode != "train":
        raise RecipeError("mode: 'inference' is for planning, and a profile is of training; write mode=train")
