"""The loop: windows in, steps taken, figures written down, checkpoints saved. It knows no framework."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tightfit.backends.base import PendingResult, Step, StepResult, Total, WindowSource
from tightfit.errors import NonFiniteLoss
from tightfit.recipe import Recipe
from tightfit.tasks import Window
from tightfit.training import checkpoints
from tightfit.training.progress import Listener
from tightfit.training.records import MetricsFile, Trackers
from tightfit.training.run_folder import RunFolder
from tightfit.training.schedule import learning_rate
from tightfit.training.stopping import StopRequest

COUNTERS = ("training_seconds", "data_wait_seconds", "samples", "tokens")


@dataclass
class Progress:
    """How far a run has come. Seconds count steps and waiting for data in this process; evaluation, saving and
    compiling are left out."""

    step: int = 0
    training_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    stopped_by: str | None = None


@dataclass
class _Interval:
    """What has been seen since the last line of metrics."""

    loss: float = 0.0
    count: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, window: Any, seconds: float) -> None:
        self.loss += result.loss.sum
        self.count += result.loss.count
        self.samples += window.samples
        self.tokens += window.tokens
        self.seconds += seconds


@dataclass(frozen=True)
class _Taken:
    """A step that was dispatched and not yet read."""

    number: int
    window: Any
    pending: PendingResult
    learning_rate: float


class Loop:
    """Runs a step over windows until `recipe.max_steps`, or until asked to stop.

    Where a step's figures are still on their way, they are read after the next one was dispatched, so that a device
    never waits for the host.
    """

    def __init__(
        self,
        recipe: Recipe,
        step: Step,
        source: WindowSource,
        evaluation: Callable[[], Iterable[Window]] | None,
        folder: RunFolder,
        metrics: MetricsFile,
        trackers: Trackers,
        listener: Listener,
    ) -> None:
        self.recipe = recipe
        self.step = step
        self.source = source
        self.evaluation = evaluation
        self.folder = folder
        self.metrics = metrics
        self.trackers = trackers
        self.listener = listener
        self.progress = Progress()
        self._interval = _Interval()
        self._mark = 0.0
        self._compiled = 0.0

    def resume(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.step.load(checkpoint.folder, checkpoint.meta)
        self.progress.step = checkpoint.step

    def run(self) -> Progress:
        """Train to the last step. Raises NonFiniteLoss; a request to stop saves and returns."""
        recipe, progress = self.recipe, self.progress
        self.listener.started(progress.step, recipe.max_steps)
        with StopRequest() as stop:
            windows = self.step.windows(self.source, progress.step, recipe.max_steps)
            taken: _Taken | None = None
            self._mark = time.perf_counter()
            while progress.step < recipe.max_steps and stop.signal is None:
                before = time.perf_counter()
                window = next(windows)
                progress.data_wait_seconds += time.perf_counter() - before
                rate = learning_rate(recipe, progress.step)
                pending = self.step(window, rate)
                progress.step += 1
                previous, taken = taken, _Taken(progress.step, window, pending, rate)
                if previous is not None:
                    self._account(previous)
                if pending.ready() or self._pauses_at(progress.step):
                    self._account(taken)
                    taken = None
                if self._pauses_at(progress.step):
                    self._pause(progress.step)
            if taken is not None:
                self._account(taken)
            if stop.signal is not None:
                progress.stopped_by = stop.signal.name
        self.listener.finished()
        if progress.stopped_by is None and progress.eval_loss is None:
            self.evaluate()
        self.save()
        return progress

    def _account(self, taken: _Taken) -> None:
        """Read a step's figures, check them, and write a line where one is due."""
        result = taken.pending.read()
        if not math.isfinite(result.loss.sum):
            raise NonFiniteLoss(
                f"the loss of step {taken.number} is {result.loss.sum} (batch: {taken.window.origin}); nothing was "
                f"saved since. Try learning_rate={self.recipe.learning_rate / 3:.1g}, warmup_steps="
                f"{max(2 * self.recipe.warmup_steps, 100)}, max_grad_norm=1.0 or precision=fp32, or look at that batch"
            )
        now, compiled = time.perf_counter(), self.step.compile_seconds
        seconds = max(now - self._mark - (compiled - self._compiled), 1e-9)
        self._mark, self._compiled = now, compiled
        progress = self.progress
        progress.training_seconds += seconds
        progress.samples += taken.window.samples
        progress.tokens += taken.window.tokens
        progress.losses.append(result.loss.mean)
        self._interval.add(result, taken.window, seconds)
        self.listener.stepped(taken.number, result.loss.mean, self._interval.tokens / self._interval.seconds)
        if taken.number % self.recipe.logging_steps == 0 or taken.number == self.recipe.max_steps:
            self._write_line(taken, result)

    def _write_line(self, taken: _Taken, result: StepResult) -> None:
        seen, self._interval = self._interval, _Interval()
        line: dict[str, Any] = {
            "step": taken.number,
            "loss": Total(seen.loss, seen.count).mean,
            "learning_rate": taken.learning_rate,
            "tokens_per_second": seen.tokens / seen.seconds,
            "samples_per_second": seen.samples / seen.seconds,
        }
        if result.grad_norm is not None:
            line["grad_norm"] = result.grad_norm
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self.metrics.write(line)
        self.trackers.write(line)

    def _pauses_at(self, step: int) -> bool:
        every = (self.recipe.eval_steps, self.recipe.save_steps)
        return any(n is not None and step % n == 0 for n in every)

    def _pause(self, step: int) -> None:
        """Evaluate and save where they are due, off the clock."""
        if self.recipe.eval_steps and step % self.recipe.eval_steps == 0:
            self.evaluate()
        if self.recipe.save_steps and step % self.recipe.save_steps == 0 and step < self.recipe.max_steps:
            self.save()
        self._mark = time.perf_counter()

    def evaluate(self) -> None:
        """The held-out loss, written down; nothing where nothing is held out."""
        if self.evaluation is None:
            return
        total = self.step.evaluate(self.evaluation())
        if total.count == 0:
            return
        self.progress.eval_loss = total.mean
        self._write({"step": self.progress.step, "eval_loss": total.mean})
        self.listener.message(f"step {self.progress.step}: held-out loss {total.mean:.4f}")

    def save(self) -> None:
        """A checkpoint of the step at hand; older ones beyond the limit go."""
        counters = {name: getattr(self.progress, name) for name in COUNTERS}
        checkpoints.save(self.folder.checkpoints, self.progress.step, self.step.save, counters)
        checkpoints.prune(self.folder.checkpoints, self.recipe.save_total_limit)
