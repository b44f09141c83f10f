"""Progress of a run, sums of its steps, and the check that its numbers are finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tightfit.backends.base import Metric, PendingResult, StepResult
from tightfit.backends.world import World
from tightfit.errors import NonFiniteLoss, OutOfMemory
from tightfit.recipe import Recipe

SKIPS_IN_A_ROW = 50
"""So many steps skipped by loss scaling, one after the other, mean that it will not recover."""
SAVE_SECONDS, SAVE_SHARE = 900.0, 0.05
"""Seconds between checkpoints that are saved by time, and the share of it that saving takes at most."""
SAVE_REQUEST = 0.5
"""Code for "save a checkpoint" in the all-reduce (max) that also carries stop signals, whose numbers are 1 or more."""


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was dispatched and not yet read. profiled: whether its time is not the run's. waited: seconds that
    its global batch was waited for."""

    number: int
    global_batch: Any
    pending: PendingResult
    learning_rate: float
    profiled: bool
    waited: float


@dataclass
class TrainerState:
    """Progress of a run. All but `step` and `tokens_seen`, which count from the run's beginning, is this
    process's; seconds count steps and waiting for data, while evaluation, saving, compiling and a profiled step are
    left out; so are that step's samples and tokens.

    evaluation: the last one's metrics, and eval_step the step that it was of. best_step, best_metrics: of the best one
    that has a checkpoint, where they are compared.
    """

    step: int = 0
    first_step: int = 0
    skipped_steps: int = 0
    profiled_steps: int = 0
    training_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    tokens_seen: int = 0
    evaluation: dict[str, Any] = field(default_factory=dict)
    eval_step: int | None = None
    best_step: int | None = None
    best_metrics: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None
    early_stopped: bool = False


class OutOfMemoryInLoop(OutOfMemory):
    """An OutOfMemory in training's loop, or in what follows it.

    step: how many steps the loop had taken. state: its account of them, where they were saved. held: bytes of the
    device by what held them then, where that is known.
    """

    step: int
    state: TrainerState | None = None
    held: Mapping[str, int] = MappingProxyType({})


class SaveTimer:
    """Timer of `save_steps: auto`: a checkpoint every SAVE_SECONDS, less often where saving takes more than SAVE_SHARE
    of the time. due: whether one is saved after the current step."""

    def __init__(self) -> None:
        self.due = False
        self.restart()

    def restart(self, took: float = 0.0) -> None:
        """Start counting from now. took: seconds that saving the last checkpoint took."""
        self._at = time.monotonic() + max(SAVE_SECONDS, took / SAVE_SHARE)

    def agree(self, world: World, signal: int, *, by_time: bool) -> int:
        """All-reduced stop signal of the processes, 0 for none; without one, rank 0's clock decides for all of them
        whether a checkpoint is due."""
        is_time = by_time and world.rank == 0 and time.monotonic() >= self._at
        asked = world.all_reduce_max(signal or (SAVE_REQUEST if is_time else 0))
        self.due = asked == SAVE_REQUEST
        return int(asked)


@dataclass
class Interval:
    """Sums since the last line of metrics. metrics: sum and count of each that steps report beside their loss."""

    loss: float = 0.0
    count: int = 0
    skipped: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self.loss += result.loss.sum
        self.count += result.loss.count
        self.skipped += result.skipped
        for name, metric in result.metrics.items():
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = [total + metric.sum, count + metric.count]

    def kept(self) -> dict[str, Any]:
        """The part that a checkpoint keeps: all that does not depend on the machine's speed."""
        return {"loss": self.loss, "count": self.count, "skipped": self.skipped, "metrics": self.metrics}

    def figures(self, mfu: Callable[[float], float] | None) -> dict[str, float]:
        """The metrics to write; no loss where no label counted, no rates of a profiled step alone. mfu: that
        of so many tokens a second."""
        found: dict[str, float] = {"loss": self.loss / self.count} if self.count else {}
        found |= {name: total / count for name, (total, count) in self.metrics.items()}
        if self.seconds:
            found["tokens_per_second"] = self.tokens / self.seconds
            found["samples_per_second"] = self.samples / self.seconds
            if mfu is not None:
                found["mfu"] = mfu(found["tokens_per_second"])
        if self.skipped:
            found["skipped_steps"] = self.skipped
        return found


@dataclass
class FiniteCheck:
    """The check of each step's figures. skips: steps that loss scaling has skipped since the last one that it did
    not."""

    skips: int = 0

    def check(self, dispatched: DispatchedStep, result: StepResult, recipe: Recipe) -> None:
        """Raise NonFiniteLoss where a step's loss or, without loss scaling to skip the step, its gradients are not."""
        what = None
        if not math.isfinite(result.loss.sum):
            what = f"the loss of step {dispatched.number} is {result.loss.sum}"
        elif result.grad_norm is not None and not math.isfinite(result.grad_norm) and not result.skipped:
            what = f"the gradients of step {dispatched.number} are not finite (norm {result.grad_norm})"
        self.skips = self.skips + 1 if result.skipped else 0
        if self.skips >= SKIPS_IN_A_ROW:
            what = f"loss scaling has skipped {self.skips} steps up to step {dispatched.number}: fp16 overflows"
        if what is not None:
            what += f" (batch: {dispatched.global_batch.origin}); nothing was saved since"
            raise not_finite(what, recipe, "; or look at that batch")


def not_finite(what: str, recipe: Recipe, also: str = "") -> NonFiniteLoss:
    """The error of a run whose numbers are not finite, with ways out."""
    from tightfit.planning.suggestions import stability_suggestions

    return NonFiniteLoss(f"{what}. Try {'; or '.join(stability_suggestions(recipe))}{also}")
