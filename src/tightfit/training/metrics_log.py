"""The metrics of a run as it goes on: metrics.jsonl, and the trackers that a recipe names."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tightfit.errors import MissingLibrary, RecipeError, install_command, nearest, one_line
from tightfit.files import write_atomically
from tightfit.recipe import Recipe
from tightfit.training.run_folder import METRICS, RunFolder, finite


def require_trackers(recipe: Recipe) -> dict[str, Any]:
    """Accelerate's classes of the trackers that a recipe names, by their names. Raises MissingLibrary where a library
    of theirs is not installed, RecipeError for a name that is not known."""
    if not recipe.report_to:
        return {}
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
        from accelerate.utils import LoggerType
    except ImportError:
        wanted = "tensorboard" if "tensorboard" in recipe.report_to else "accelerate"
        raise MissingLibrary("accelerate", "report_to", install_command(wanted)) from None
    known = {str(getattr(name, "value", name)): tracker for name, tracker in LOGGER_TYPE_TO_CLASS.items()}
    missing = {kind.value for kind in LoggerType} - {kind.value for kind in get_available_trackers()}
    for name in recipe.report_to:
        if name not in known:
            raise RecipeError(f"report_to: {name!r} is not known; {nearest(name, known)}")
        if name in missing:
            raise MissingLibrary(name, f"report_to={name}")
    return {name: known[name] for name in recipe.report_to}


class MetricsLog:
    """metrics.jsonl in a run's folder, and the trackers that a recipe names: TensorBoard, Weights & Biases and others,
    through Accelerate.

    The file holds one JSON object a line: `step`, and what was measured there; null for what is not a finite number.
    Lines after `resume_step` are dropped first; `evaluations` are those up to it that are of one.
    """

    def __init__(self, recipe: Recipe, folder: Path, resume_step: int) -> None:
        path, kept = folder / METRICS, []
        self.evaluations: list[dict[str, Any]] = []
        for line, values in RunFolder(folder).logged() if resume_step else ():
            if values and values["step"] <= resume_step:
                kept.append(line)
                self.evaluations += [values] if "eval_loss" in values else []
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._trackers = ExitStack()
        self._logs: list[Callable[..., None]] = []
        with self._trackers:
            self._start_trackers(recipe, folder)
            self._trackers = self._trackers.pop_all()  # none goes on where one cannot start
        self._file = path.open("a", 1, "utf-8")

    def _start_trackers(self, recipe: Recipe, folder: Path) -> None:
        trackers = require_trackers(recipe)
        if not trackers:
            return
        from accelerate import PartialState

        PartialState(cpu=recipe.device == "cpu")
        values = {name: value if isinstance(value, int | float | str) else str(value)
                  for name, value in recipe.to_dict().items()}
        for name, kind in trackers.items():
            arguments = {"logging_dir": str(folder / "trackers")} if kind.requires_logging_directory else {}
            try:
                tracker = kind(folder.name, **arguments)
                tracker.start()
                tracker.store_init_configuration(values)
            except Exception as error:  # each tracker has exceptions of its own
                raise RecipeError(f"report_to: {name} cannot start: {one_line(error)}") from None
            self._trackers.callback(tracker.finish)
            self._logs.append(tracker.log)

    def write(self, values: dict[str, Any]) -> None:
        """Write down what was measured at `values["step"]`."""
        self._file.write(json.dumps(finite(values), allow_nan=False) + "\n")
        # as the Hugging Face Trainer calls them there, so that both draw in one chart
        tagged = {name.replace("eval_", "eval/", 1) if name.startswith("eval_") else f"train/{name}": value
                  for name, value in values.items() if name != "step"}
        for log in self._logs:
            log(tagged, step=values["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()
        self._trackers.close()
