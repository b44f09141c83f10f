"""The loop: global batches in, steps taken, figures written down, checkpoints saved. It knows no framework."""

from __future__ import annotations

import math
import signal
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tightfit.backends.base import GlobalBatchSource, Metric, PendingResult, Step, StepResult, Total
from tightfit.backends.world import ALONE, World
from tightfit.errors import CheckpointError, NonFiniteLoss
from tightfit.recipe import Recipe
from tightfit.tasks import GlobalBatch
from tightfit.training import checkpoints
from tightfit.training.listeners import Listener
from tightfit.training.records import MetricsLog, Unwritten
from tightfit.training.run_folder import RunFolder
from tightfit.training.schedule import learning_rate
from tightfit.training.stopping import StopRequest

if TYPE_CHECKING:
    from tightfit.profiling.measure import RunProfile

SKIPS_IN_A_ROW = 50
"""So many steps skipped by loss scaling, one after the other, mean that it will not recover."""


@dataclass
class TrainerState:
    """How far a run has come. All but `step` is this process's; seconds count steps and waiting for data, while
    evaluation, saving, compiling and a profiled step are left out; so are that step's samples and tokens."""

    step: int = 0
    first_step: int = 0
    skipped_steps: int = 0
    training_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    eval_loss: float | None = None
    stopped_by: str | None = None


@dataclass
class _Interval:
    """Sums since the last line of metrics. metrics: sum and count of each that steps report beside their loss."""

    loss: float = 0.0
    count: int = 0
    skipped: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _DispatchedStep:
    """A step that was dispatched and not yet read. profiled: whether its time is not the run's."""

    number: int
    global_batch: Any
    pending: PendingResult
    learning_rate: float
    profiled: bool


@dataclass
class TrainingLoop:
    """Runs a step over global batches until `recipe.max_steps`, or until asked to stop.

    Where a step's figures are still on their way, they are read after the next one was dispatched, so that a device
    never waits for the host.
    """

    recipe: Recipe
    step: Step
    source: GlobalBatchSource
    evaluation: Callable[[], Iterable[GlobalBatch]] | None
    folder: RunFolder
    log: MetricsLog | Unwritten
    listener: Listener
    profile: RunProfile | None = None
    world: World = ALONE
    state: TrainerState = field(default_factory=TrainerState, init=False)
    _interval: _Interval = field(default_factory=_Interval, init=False)
    _saved_at: int | None = field(default=None, init=False)
    _evaluated_at: int | None = field(default=None, init=False)
    _skips: int = field(default=0, init=False)

    def resume(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Go on from a checkpoint. Raises CheckpointError where the data is another."""
        if checkpoint.step > self.recipe.max_steps:
            field = "max_steps" if self.recipe.num_train_epochs is None else "num_train_epochs"
            raise CheckpointError(f"{field}: this run has already taken {checkpoint.step} steps, more than "
                                  f"{self.recipe.max_steps}; write a larger {field}, or another output_dir")
        if checkpoint.loop.get("data") != _signature(self.source):
            raise CheckpointError("data: it is not what it was when this run began (its first global batch or its "
                                  "number of batches differs); bring it back, or write another output_dir")
        self.step.load(checkpoint.folder, checkpoint.meta)
        self.state.step = self.state.first_step = self._saved_at = checkpoint.step
        self._interval = _Interval(**checkpoint.loop["interval"])

    def run(self) -> TrainerState:
        """Train to the last step. Raises NonFiniteLoss; a request to stop saves and returns."""
        recipe, state, profile = self.recipe, self.state, self.profile
        self.listener.started(state.step, recipe.max_steps)
        with StopRequest() as stop:
            global_batches = self.step.global_batches(self.source, state.step, recipe.max_steps)
            dispatched: _DispatchedStep | None = None
            evaluated_at = self.world.from_first(lambda: self.log.evaluated_at)
            if self._evaluates_at(state.step) and evaluated_at != state.step:
                self.evaluate()  # which an end of the process came before
            self._restart_clock()
            while state.step < recipe.max_steps and not self._asked_to_stop(stop):
                if dispatched is not None and profile is not None and state.step + 1 == profile.at:
                    self._record(dispatched)  # or the step that is profiled would wait for it
                    dispatched = None
                previous, dispatched = dispatched, self._dispatch(global_batches)
                if previous is not None:
                    self._record(previous)
                if dispatched.pending.ready() or dispatched.profiled or self._pauses_at(state.step):
                    self._record(dispatched)
                    dispatched = None
                if self._pauses_at(state.step):
                    self._pause(state.step)
                if profile is not None and state.step == profile.at:
                    profile.keep()
                    self._restart_clock()
            if dispatched is not None:
                self._record(dispatched)
            if asked := self._asked_to_stop(stop):
                state.stopped_by = signal.Signals(asked).name
            self.save()
            if state.stopped_by is None and self._evaluated_at != state.step:
                self.evaluate()
        self.listener.finished()
        return state

    def _asked_to_stop(self, stop: StopRequest) -> int:
        """The signal that a process of the run was sent, perhaps another one; 0 for none."""
        return int(self.world.largest(stop.signal or 0))

    def _dispatch(self, global_batches: Iterator[Any]) -> _DispatchedStep:
        """Dispatch the next step."""
        state, profile = self.state, self.profile
        rate, number = learning_rate(self.recipe, state.step), state.step + 1
        with nullcontext() if profile is None else profile.timed(number):
            before = time.perf_counter()
            global_batch = next(global_batches)
            waited = time.perf_counter() - before
            if profile is not None and profile.at == number:
                pending, profiled = profile.take(global_batch, rate), True
            else:
                pending, profiled = self.step(global_batch, rate), False
                state.data_wait_seconds += waited
        state.step = number
        return _DispatchedStep(number, global_batch, pending, rate, profiled)

    def _restart_clock(self) -> None:
        self._mark, self._compiled = time.perf_counter(), self.step.compile_seconds

    def _record(self, dispatched: _DispatchedStep) -> None:
        """Read a step's figures, check them, and write a line where one is due."""
        result = dispatched.pending.read()
        self._check(dispatched, result)
        now, compiled = time.perf_counter(), self.step.compile_seconds
        seconds = max(now - self._mark - (compiled - self._compiled), 1e-9)
        self._mark, self._compiled = now, compiled
        state = self.state
        state.losses.append(result.loss.mean)
        interval = self._interval
        interval.loss += result.loss.sum
        interval.count += result.loss.count
        interval.skipped += result.skipped
        state.metrics = dict(result.metrics)
        for name, metric in result.metrics.items():
            total, count = interval.metrics.get(name, (0.0, 0))
            interval.metrics[name] = [total + metric.sum, count + metric.count]
        if not dispatched.profiled:
            state.training_seconds += seconds
            interval.seconds += seconds
            for sums in (state, interval):
                sums.samples += dispatched.global_batch.samples
                sums.tokens += dispatched.global_batch.tokens
        self.listener.stepped(dispatched.number, result.loss.mean, interval.tokens / (interval.seconds or 1.0))
        if dispatched.number % self.recipe.logging_steps == 0 or dispatched.number == self.recipe.max_steps:
            self._write_line(dispatched, result)

    def _check(self, dispatched: _DispatchedStep, result: StepResult) -> None:
        """Raises NonFiniteLoss where the step's loss or, without loss scaling to skip the step, its gradients are."""
        what = None
        if not math.isfinite(result.loss.sum):
            what = f"the loss of step {dispatched.number} is {result.loss.sum}"
        elif result.grad_norm is not None and not math.isfinite(result.grad_norm) and not result.skipped:
            what = f"the gradients of step {dispatched.number} are not finite (norm {result.grad_norm})"
        self._skips = self._skips + 1 if result.skipped else 0
        self.state.skipped_steps += result.skipped
        if self._skips >= SKIPS_IN_A_ROW:
            what = f"loss scaling has skipped {self._skips} steps up to step {dispatched.number}: fp16 overflows"
        if what is not None:
            raise NonFiniteLoss(f"{what} (batch: {dispatched.global_batch.origin}); nothing was saved since. Try "
                                f"{_stability_text(self.recipe)}; or look at that batch")

    def _write_line(self, dispatched: _DispatchedStep, result: StepResult) -> None:
        seen, self._interval = self._interval, _Interval()
        line: dict[str, Any] = {
            "step": dispatched.number,
            "loss": Total(seen.loss, seen.count).mean,
            "learning_rate": dispatched.learning_rate,
        }
        if seen.seconds:  # a profiled step alone has none that count
            line["tokens_per_second"] = seen.tokens / seen.seconds
            line["samples_per_second"] = seen.samples / seen.seconds
        if result.grad_norm is not None:
            line["grad_norm"] = result.grad_norm
        line |= {name: total / count for name, (total, count) in seen.metrics.items()}
        if seen.skipped:
            line["skipped_steps"] = seen.skipped
        self.log.write(line)

    def _pauses_at(self, step: int) -> bool:
        every = (self.recipe.eval_steps, self.recipe.save_steps)
        return any(n is not None and step % n == 0 for n in every)

    def _pause(self, step: int) -> None:
        """Save and evaluate where they are due, off the clock; saving first, for nothing may be lost to the other."""
        if self.recipe.save_steps and step % self.recipe.save_steps == 0:
            self.save()
        if self._evaluates_at(step):
            self.evaluate()
        self._restart_clock()

    def _evaluates_at(self, step: int) -> bool:
        return bool(step and self.recipe.eval_steps and step % self.recipe.eval_steps == 0)

    def evaluate(self) -> None:
        """The held-out loss, written down; nothing where nothing is held out."""
        if self.evaluation is None:
            return
        total = self.step.evaluate(self.evaluation())
        if total.count == 0:
            return
        self._evaluated_at = self.state.step
        self.state.eval_loss = total.mean
        self.log.write({"step": self.state.step, "eval_loss": total.mean})
        self.listener.message(f"step {self.state.step}: held-out loss {total.mean:.4f}")

    def save(self) -> None:
        """A checkpoint of the step at hand, if it has none; older ones beyond the limit go.

        Raises NonFiniteLoss rather than save weights that are no numbers.
        """
        step = self.state.step
        if self._saved_at == step:
            return
        if not self.step.is_finite():
            raise NonFiniteLoss(f"the weights of step {step} are not finite; they were not saved. Try "
                                + _stability_text(self.recipe))
        seen = self._interval
        interval = {"loss": seen.loss, "count": seen.count, "skipped": seen.skipped, "metrics": seen.metrics}
        loop = {"interval": interval, "data": _signature(self.source)}
        self._saved_at = step
        if self.world.rank:
            self.step.save(self.folder.checkpoints)
            return
        checkpoints.save(self.folder.checkpoints, step, self.step.save, loop)
        checkpoints.prune(self.folder.checkpoints, self.recipe.save_total_limit)


def _stability_text(recipe: Recipe) -> str:
    from tightfit.planning.suggestions import stability_suggestions

    return "; or ".join(stability_suggestions(recipe))


def _signature(source: GlobalBatchSource) -> list[int]:
    """Fingerprint of a run's data: global batches in an epoch, and a checksum of the first one's arrays."""
    value = 0
    for batch in source.global_batch(0).micro_batches:
        for array in (*batch.inputs.values(), batch.labels):
            value = zlib.crc32(array.tobytes(), value)
    return [len(source), value]
