"""Metrics of a run: metrics.jsonl, and the trackers a recipe names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tightfit.errors import MissingLibrary, RecipeError, nearest
from tightfit.files import write_atomically
from tightfit.recipe import Recipe


class MetricsFile:
    """One JSON object a line: `step`, and what was measured there; null for what is not a finite number. Lines after
    `resume_step` are dropped first."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        if path.exists() and resume_step:
            for line in path.read_text(errors="replace").splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        kept.append(line)
                except (ValueError, TypeError, KeyError):  # such as the last line of a run that was cut off
                    continue
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def write(self, values: dict[str, Any]) -> None:
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class Trackers:
    """TensorBoard, Weights & Biases and others, through Accelerate's trackers. Empty where none is named."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._trackers: list[Any] = []
        if not recipe.report_to:
            return
        try:
            from accelerate import PartialState
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        except ImportError:
            raise MissingLibrary("accelerate", "report_to", "accelerate tensorboard") from None
        known = {str(getattr(name, "value", name)): tracker for name, tracker in LOGGER_TYPE_TO_CLASS.items()}
        for name in recipe.report_to:
            if name not in known:
                raise RecipeError(f"report_to: {name!r} is not known; {nearest(name, known)}")
        PartialState(cpu=recipe.device == "cpu")
        try:
            self._start(recipe, folder, known)
        except Exception:
            self.__exit__(None, None, None)
            raise

    def _start(self, recipe: Recipe, folder: Path, known: dict[str, Any]) -> None:
        for name in recipe.report_to:
            tracker = known[name]
            arguments = {"logging_dir": str(folder / "trackers")} if tracker.requires_logging_directory else {}
            try:
                live = tracker(folder.name, **arguments)
                live.start()
                live.store_init_configuration(_flat(recipe.to_dict()))
            except ImportError:
                raise MissingLibrary(name, f"report_to={name}", name) from None
            except Exception as error:  # each tracker has exceptions of its own
                raise RecipeError(f"report_to: {name} cannot start: {' '.join(str(error).split())}") from None
            self._trackers.append(live)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._trackers:
            tracker.finish()

    def write(self, values: dict[str, Any]) -> None:
        if self._trackers:
            numbers = {name: value for name, value in values.items() if name != "step"}
            for tracker in self._trackers:
                tracker.log(numbers, step=values["step"])


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Values that every tracker can store."""
    plain = (int, float, str, bool)
    return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}
