"""The loop: global batches in, steps taken, figures written down, checkpoints saved. It knows no framework."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tightfit.backends.base import GlobalBatchSource, Step, StepResult
from tightfit.backends.world import ALONE, World
from tightfit.errors import OutOfMemory, forget_frames
from tightfit.metrics import evaluation_metrics, metrics_of, metrics_text
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, GlobalBatch
from tightfit.text import percent
from tightfit.training import checkpoints
from tightfit.training.data_workers import DataWorkers
from tightfit.training.listeners import Listener
from tightfit.training.metrics_log import MetricsLog
from tightfit.training.run_folder import RunFolder
from tightfit.training.schedule import learning_rate
from tightfit.training.state import (
    DispatchedStep,
    FiniteCheck,
    Interval,
    OutOfMemoryInLoop,
    SaveTimer,
    TrainerState,
    not_finite,
)
from tightfit.training.stopping import StopRequest

if TYPE_CHECKING:
    from tightfit.profiling.measure import RunProfile
    from tightfit.training.best_checkpoint import Best


@dataclass
class TrainingLoop:
    """Runs a step over global batches until `recipe.max_steps`, or until asked to stop.

    Where a step's figures are still on their way, they are read after the next one was dispatched, so that a device
    never waits for the host. log: of the first process. mfu: that of so many tokens a second. workers: data
    workers, where their number is open.
    """

    recipe: Recipe
    step: Step
    source: GlobalBatchSource
    evaluation: Callable[[], Iterable[GlobalBatch]] | None
    folder: RunFolder
    log: MetricsLog | None
    listener: Listener
    profile: RunProfile | None = None
    world: World = ALONE
    mfu: Callable[[float], float] | None = None
    workers: DataWorkers | None = None
    state: TrainerState = field(default_factory=TrainerState, init=False)
    _interval: Interval = field(default_factory=Interval, init=False)
    _saved_at: int | None = field(default=None, init=False)
    _timer: SaveTimer = field(default_factory=SaveTimer, init=False)
    _finite: FiniteCheck = field(default_factory=FiniteCheck, init=False)
    _unlabelled: bool = field(default=False, init=False)
    best: Best | None = field(default=None, init=False)

    def resume(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Go on from a checkpoint. Raises CheckpointError where the data is another."""
        checkpoints.require_continuing(checkpoint, self.recipe, self.source)
        self.step.load(checkpoint.folder, checkpoint.meta)
        self.state.step = self.state.first_step = self._saved_at = checkpoint.step
        self._interval = Interval(**checkpoint.loop["interval"])
        self.state.tokens_seen = checkpoint.loop.get("tokens_seen", 0)

    def carry(self, before: TrainerState) -> None:
        """Count the steps of a loop in this process that ended where this one goes on."""
        self.state = replace(before, step=self.state.step)

    def run(self) -> TrainerState:
        """Train to the last step. Raises NonFiniteLoss, and OutOfMemory with the steps before it saved where their
        weights are whole; a request to stop saves and returns."""
        recipe, state, profile = self.recipe, self.state, self.profile
        self.listener.started(state.step, recipe.max_steps)
        dispatched: DispatchedStep | None = None
        with StopRequest(self.listener.stopping) as stop, self.saved_on_out_of_memory(lambda: dispatched, stop):
            global_batches = self.step.global_batches(self.source, state.step, recipe.max_steps)
            self._remember(*self.world.broadcast_from_rank0(lambda: (
                self.log.evaluations if self.log else (), checkpoints.steps(self.folder.checkpoints))))
            if self._ends_at(state.step, recipe.eval_steps) and state.eval_step != state.step:
                self.evaluate()  # which an end of the process came before
            self._restart_clock()
            while state.step < recipe.max_steps and not (state.early_stopped or self._asked_to_stop(stop)):
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
                if self.workers is not None and (share := self.workers.raised()):
                    self.listener.message(f"{percent(share)} of the time went into waiting for data: from step "
                                          f"{state.step + 1} on loading.workers={self.workers.number}")
                    global_batches.close()
                    global_batches = self.step.global_batches(self.source, state.step, recipe.max_steps,
                                                              self.workers.number)
            if dispatched is not None:
                self._record(dispatched)
            if not state.early_stopped and (asked := self._asked_to_stop(stop)):
                state.stopped_by = signal.Signals(asked).name
            self.save()
            if state.stopped_by is None and state.eval_step != state.step:
                self.evaluate()
        self.listener.finished()
        return state

    @contextmanager
    def saved_on_out_of_memory(
        self, unread: Callable[[], DispatchedStep | None] = lambda: None, stop: StopRequest | None = None
    ) -> Iterator[None]:
        """Context of the loop, and of what follows it: an OutOfMemory says of the steps taken how many they were. They
        are saved where memory allows it once that of the failed one is given back. unread: the last of them, where it
        still is. Raises OutOfMemoryInLoop, but not where `stop` was asked for and they are saved."""
        try:
            yield
        except OutOfMemory as error:
            found = OutOfMemoryInLoop(*error.args)
            found.step = self.state.step
            if self.recipe.recover and self.step.intact and self.world.size == 1:
                found.held = self.step.held_memory()
                forget_frames(error)  # which hold the tensors of the step that failed
                if (last := unread()) is not None and last.number > len(self.state.losses) + self.state.first_step:
                    self._record(last)
                with suppress(OutOfMemory):
                    self.save()
                    found.state = self.state
                    if stop is not None and stop.signal:
                        self.state.stopped_by = stop.signal.name
                        return
            raise found from None

    def _remember(self, evaluations: Sequence[dict[str, Any]], kept: Collection[int]) -> None:
        """Take up the evaluations that this run made before it went on here. kept: steps that have checkpoints."""
        for line in evaluations[-1:]:
            self.state.eval_step, self.state.evaluation = line["step"], metrics_of(line)
        if self.recipe.best_metric is not None:
            from tightfit.training.best_checkpoint import Best  # for runs that compare evaluations

            self.best = Best.of_run(self.recipe, evaluations, kept, self.listener.message)
            self._follow_best()

    def _asked_to_stop(self, stop: StopRequest) -> int:
        """The signal that a process of the run was sent, perhaps another one; 0 for none."""
        return self._timer.agree(self.world, stop.signal or 0, by_time=self.recipe.save_steps == "auto")

    def _dispatch(self, global_batches: Iterator[Any]) -> DispatchedStep:
        state, profile = self.state, self.profile
        rate, number = learning_rate(self.recipe, state.step), state.step + 1
        with nullcontext() if profile is None else profile.timed(number):
            before = time.perf_counter()
            global_batch = next(global_batches)
            if global_batch.count == 0 and not self._unlabelled:
                self._unlabelled = True
                self.listener.message(f"warning: every label of step {number} is {IGNORE} ({global_batch.origin}): "
                                      "there is nothing to learn from it, nor perhaps from others")
            waited = time.perf_counter() - before
            if profile is not None and profile.at == number:
                pending, profiled = profile.take(global_batch, rate), True
            else:
                pending, profiled = self.step(global_batch, rate), False
                state.data_wait_seconds += waited
        state.step = number
        return DispatchedStep(number, global_batch, pending, rate, profiled, waited)

    def _restart_clock(self) -> None:
        self._mark, self._compiled = time.perf_counter(), self.step.compile_seconds

    def _record(self, dispatched: DispatchedStep) -> None:
        """Read a step's figures, check them, and write a line where one is due."""
        result = dispatched.pending.read()
        self.state.skipped_steps += result.skipped
        self._finite.check(dispatched, result, self.recipe)
        now, compiled = time.perf_counter(), self.step.compile_seconds
        seconds = max(now - self._mark - (compiled - self._compiled), 1e-9)
        self._mark, self._compiled = now, compiled
        state, interval = self.state, self._interval
        state.losses.append(result.loss.mean)
        interval.add(result)
        state.metrics = dict(result.metrics)
        state.tokens_seen += dispatched.global_batch.tokens
        if dispatched.profiled:
            state.profiled_steps += 1
        else:
            state.training_seconds += seconds
            interval.seconds += seconds
            if self.workers is not None:
                self.workers.add(dispatched.waited, seconds)
            for sums in (state, interval):
                sums.samples += dispatched.global_batch.samples
                sums.tokens += dispatched.global_batch.tokens
        self.listener.stepped(dispatched.number, result.loss.mean, interval.tokens / (interval.seconds or 1.0))
        if self._ends_at(dispatched.number, self.recipe.logging_steps) or dispatched.number == self.recipe.max_steps:
            self._write_line(dispatched, result)

    def _write_line(self, dispatched: DispatchedStep, result: StepResult) -> None:
        seen, self._interval = self._interval, Interval()
        if self.log is not None:
            self.log.write({
                "step": dispatched.number,
                "epoch": round(dispatched.number / len(self.source), 4),
                **seen.figures(self.mfu),
                "learning_rate": dispatched.learning_rate,
                **({} if result.grad_norm is None else {"grad_norm": result.grad_norm}),
                "num_input_tokens_seen": self.state.tokens_seen,
                "peak_memory": self.step.peak_memory(),
            })

    def _pauses_at(self, step: int) -> bool:
        return self._saves_at(step) or self._ends_at(step, self.recipe.eval_steps)

    def _saves_at(self, step: int) -> bool:
        return self._timer.due or self._ends_at(step, self.recipe.save_steps)

    def _pause(self, step: int) -> None:
        """Save and evaluate where they are due, off the clock; saving first, for nothing may be lost to the other."""
        if self._saves_at(step):
            self.save()
        if self._ends_at(step, self.recipe.eval_steps):
            self.evaluate()
        self._restart_clock()

    def _ends_at(self, step: int, every: float | str | None) -> bool:
        """Whether so many steps, such a share of all, or an epoch end with this step."""
        if not every or every == "auto" or step == 0:
            return False
        return step % (len(self.source) if isinstance(every, str) else self.recipe.in_steps(every)) == 0

    def evaluate(self) -> None:
        """The metrics of the held-out samples, written down; nothing where nothing is held out."""
        if self.evaluation is None:
            return
        found = self.step.evaluate(self.evaluation())
        if found.loss.count == 0:
            self.listener.message(f"nothing is evaluated: every label of the held-out samples is {IGNORE}")
            return
        self.state.eval_step, self.state.evaluation = self.state.step, evaluation_metrics(found)
        if self.log is not None:
            self.log.write({"step": self.state.step, **self.state.evaluation})
        self.listener.message(f"step {self.state.step}: held-out {metrics_text(self.state.evaluation)}")
        if self.best is not None and self.best.add(self.state.step, self.state.evaluation):
            self.save()
            self._prune()
        self._follow_best()

    def _follow_best(self) -> None:
        """Note the best evaluation, and end the run where as many were no better as the recipe waits for."""
        if (best := self.best) is None:
            return
        self.state.best_step, self.state.best_metrics = best.step, best.metrics
        if best.is_out_of_patience and self.state.step < self.recipe.max_steps:
            self.state.early_stopped = True
            self.listener.message(f"step {self.state.step}: eval_{self.recipe.best_metric} was no better in "
                                  f"{best.waited} evaluations than at step {best.top_step}; the run ends here, as "
                                  "early_stopping_patience says")

    def save(self) -> None:
        """A checkpoint of the step at hand, if it has none; older ones beyond the limit go.

        Raises NonFiniteLoss rather than save weights that are no numbers.
        """
        step = self.state.step
        if self._saved_at == step:
            return
        if not self.step.is_finite():
            raise not_finite(f"the weights of step {step} are not finite; they were not saved", self.recipe)
        began = time.perf_counter()
        loop = {"interval": self._interval.kept(), "tokens_seen": self.state.tokens_seen,
                "data": checkpoints.data_signature(self.source)}
        if self.world.rank:
            self.step.save(self.folder.checkpoints)
        else:
            self.folder.require_kept()
            checkpoints.save(self.folder.checkpoints, step, self.step.save, loop)
            self._prune()
        self._saved_at = step
        self._timer.restart(time.perf_counter() - began)

    def _prune(self) -> None:
        if self.world.rank == 0:
            best = None if self.best is None else self.best.step
            checkpoints.prune(self.folder.checkpoints, self.recipe.save_total_limit, best)
