"""What `tightfit profile` does: a few real steps measured, the same step predicted, both kept and drawn as a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tightfit.commands.report import run_report
from tightfit.devices import Device
from tightfit.doctor.watching import Series, watched
from tightfit.errors import ReportError
from tightfit.recipe_files import name_and_overrides
from tightfit.training.profiling import keep_profile, prediction, profile_of, profile_recipe
from tightfit.training.progress import Terminal
from tightfit.training.run_folder import CHROME_TRACE, PLAN, run_path, write_atomically
from tightfit.training.trainer import recipe_for_machine


def run_profile(name: str, overrides: Sequence[str] = (), output: Path | None = None) -> Path:
    """Measure the recipe's step on this machine, beside its prediction; the report's path.

    The run's folder gets `profile/`, `trace.json.gz` for Perfetto, on CUDA `memory.pickle` for PyTorch's memory_viz,
    and `report.html`, or `output` instead. Raises TightfitError.
    """
    name, overrides = name_and_overrides([name, *overrides])
    recipe = recipe_for_machine(name, overrides)
    folder = run_path(recipe, name)
    console = Console(stderr=True, soft_wrap=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        readings: Series = {}
        with Terminal(console) as terminal:

            @contextmanager
            def around(device: Device) -> Iterator[None]:
                with watched(device.uuid) as series:
                    yield
                readings.update(series)

            found = profile_recipe(recipe, listener=terminal, chrome_trace=folder / CHROME_TRACE, around=around)
            terminal.message("predicting the same step")
            predicted = prediction(found.backend, found.recipe, found.device)
        measured = found.measurement
        profile = profile_of(found.recipe, found.device, measured, predicted, notes=found.notes, readings=readings)
        home = keep_profile(profile, measured, folder)
        if found.plan is not None:  # not beside the plan of a run that the folder may hold
            write_atomically(home / PLAN, json.dumps(found.plan.to_json(), indent=2) + "\n")
    except OSError as error:
        raise ReportError(f"{error.filename or folder}: cannot be written ({error.strerror or error}); free some "
                          "space, or write another output_dir=...") from None
    return run_report(folder, output=output)
