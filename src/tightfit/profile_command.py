"""What `tightfit profile` does: a few real steps measured, the same step predicted, both kept and drawn as a report."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from tightfit import profiles
from tightfit.devices import Device
from tightfit.doctor.watching import Series, watched
from tightfit.errors import ReportError, TightfitError
from tightfit.planning.estimate import capacity, unseen
from tightfit.planning.targets import Target, own_target
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import step_time
from tightfit.profiles import Profile
from tightfit.report_command import run_report
from tightfit.trace import Phase, Trace
from tightfit.trace_file import replacing
from tightfit.training.profiling import Profiled, profile_recipe
from tightfit.training.progress import Terminal
from tightfit.training.run_folder import CHROME_TRACE, MEMORY_RECORD, PLAN, run_path, write_atomically
from tightfit.training.trainer import recipe_for_machine

LIBRARIES = ("torch", "transformers", "tightfit")


def run_profile(name: str, overrides: Sequence[str] = (), output: Path | None = None) -> Path:
    """Measure the recipe's step on this machine, beside its prediction; the report's path.

    The run's folder gets `profile/`, `trace.json.gz` for Perfetto, on CUDA `memory.pickle` for PyTorch's memory_viz,
    and `report.html`, or `output` instead. Raises TightfitError.
    """
    recipe = recipe_for_machine(name, overrides)
    folder = run_path(recipe, name)
    console = Console(stderr=True, soft_wrap=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        readings: Series = {}
        with Terminal(console) as terminal, _gzipped(folder / CHROME_TRACE) as chrome_trace:

            @contextmanager
            def around(device: Device) -> Iterator[None]:
                with watched(device.uuid) as series:
                    yield
                readings.update(series)

            found = profile_recipe(recipe, listener=terminal, chrome_trace=chrome_trace, around=around)
            terminal.message("predicting the same step")
            profile = profile_of(found, readings)
        home = profiles.save(profile, folder)
        if found.plan is not None:  # not beside the plan of a run that the folder may hold
            write_atomically(home / PLAN, json.dumps(found.plan.to_json(), indent=2) + "\n")
        record = found.measurement.memory_record
        if record is not None:
            with replacing(folder / MEMORY_RECORD) as temporary:
                temporary.write_bytes(pickle.dumps(record))
    except OSError as error:
        raise ReportError(f"{folder}: the profile cannot be written ({error.strerror or error}); write another "
                          "output_dir=...") from None
    return run_report(folder, output=output)


def profile_of(found: Profiled, readings: Series | None = None) -> Profile:
    """What was measured, beside what is predicted for it. readings: of the card, while steps ran."""
    recipe, measured = found.recipe, found.measurement
    target = own_target(found.device)
    values: dict[str, Any] = {}
    notes = list(found.notes)
    try:
        trace = found.backend.predict(recipe, found.device)
        values = _predicted(trace, found, target)
        notes += trace.notes
    except TightfitError as error:
        notes.append(f"not predicted: {error}")
    return Profile(
        recipe=recipe, device=target.device, measured=measured.trace, step_seconds=measured.step_seconds,
        phase_seconds=measured.phase_seconds, peak_bytes=measured.peak_bytes, overhead=measured.overhead,
        calibrated=target.ceilings is not None, readings=readings or {}, versions=_versions(),
        notes=tuple(dict.fromkeys(notes)), **values,
    )  # fmt: skip


def _predicted(trace: Trace, found: Profiled, target: Target) -> dict[str, Any]:
    """The prediction's part of a profile: the trace with its ops' seconds, the phases' and the step's peak."""
    recipe, device, ceilings = found.recipe, target.device, target.ceilings
    timed = step_time(trace, recipe, device, ceilings)
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    for op in trace.ops:
        op.seconds = op_seconds(op, device, ceilings, tf32=tf32)
    last = trace.span("step 2")
    return {
        "predicted": trace,
        "predicted_seconds": {
            Phase.DATA: timed.data, Phase.FORWARD: timed.forward, Phase.BACKWARD: timed.recompute + timed.backward,
            Phase.OPTIMIZER: timed.optimizer,
        },
        "predicted_peak_bytes": trace.peak(last.start, last.stop)[1] + unseen(trace, "allocator"),
        "capacity_bytes": capacity(trace, device),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout, not installed
            continue
    return found


@contextmanager
def _gzipped(path: Path) -> Iterator[Path]:
    """A temporary name, ending as the profiler wants it, whose file takes the place of `path` in the end."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        yield temporary
        if temporary.exists():
            shutil.move(temporary, path)
