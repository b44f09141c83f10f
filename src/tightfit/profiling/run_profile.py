"""One step of a training run, profiled while the run goes on, for `tightfit report` to draw with its prediction.

What the run learns is the same without: the step is followed, not changed. Whatever fails here is one line.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tightfit.backends.base import PLAIN, WARM_UP, Backend, PendingResult, Step, StepProfiler
from tightfit.devices import Device
from tightfit.profiling import CHROME_TRACE
from tightfit.profiling.measure import keep_profile, prediction, profile_of
from tightfit.recipe import Recipe
from tightfit.training.progress import Listener


def profiled_step(recipe: Recipe, first_step: int) -> int | None:
    """The step to profile of a run, or of one that goes on behind `first_step`; None for none.

    It is `profile_step`, but in no process one of the first, which warm up or are timed as they are.
    """
    if recipe.profile_step is None or first_step >= recipe.profile_step:
        return None
    at = max(recipe.profile_step, first_step + WARM_UP + 2)
    return at if at <= recipe.max_steps else None


class RunProfile:
    """Profiles step `at`, and by the clock times those before it.

    To be made before the run's step is built: predicting drops what was compiled, and draws weights.
    """

    def __init__(
        self, at: int, recipe: Recipe, device: Device, backend: Backend, module: Any, folder: Path, listener: Listener
    ) -> None:
        self.at = at
        self._recipe, self._device, self._backend = recipe, device, backend
        self._folder, self._listener = folder, listener
        self._profiler: StepProfiler | None = None
        self._timed = range(0)
        self._notes: tuple[str, ...] = ()
        listener.message(f"predicting a step, to compare step {at} with")
        try:
            self._predicted = prediction(backend, recipe, device, module)
        except Exception as error:  # a model of one's own may fail in any way
            self._predicted = {"notes": (f"not predicted: {_sentence(error)}",)}

    def begin(self, step: Step, first_step: int, notes: tuple[str, ...] = ()) -> None:
        """The run's step is there, and the run goes on behind `first_step`. notes: of its build."""
        self._profiler = self._backend.step_profiler(step)
        self._timed = range(max(first_step + WARM_UP + 1, self.at - PLAIN), self.at)
        self._notes = notes

    def timed(self, number: int) -> AbstractContextManager[None]:
        """Around a step of the run, its wait for a window included."""
        if self._profiler is None or number not in self._timed:
            return nullcontext()
        return self._profiler.timed()

    def take(self, window: Any, learning_rate: float) -> PendingResult:
        """Take step `at`."""
        assert self._profiler is not None
        return self._profiler.profiled(window, learning_rate)

    def keep(self) -> None:
        """Write the profile into the run's folder, with a message; a warning where that fails."""
        assert self._profiler is not None
        try:
            measured = self._profiler.measurement(self._folder / CHROME_TRACE)
            notes = (f"step {self.at} of a training run", *self._notes)
            found = profile_of(self._recipe, self._device, measured, self._predicted, notes=notes)
            keep_profile(found, measured, self._folder)
        except Exception as error:  # the run is worth more than its profile
            self._listener.message(f"warning: step {self.at} has no profile, and the run goes on: {_sentence(error)}")
        else:
            self._listener.message(f"profiled step {self.at}; to draw it: tightfit report {self._folder}")
        self._profiler = None  # and all that was recorded


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: cannot be written ({error.strerror})"
    return " ".join(str(error).split()) or type(error).__name__
