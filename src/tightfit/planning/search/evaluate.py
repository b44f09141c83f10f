"""Costs of recipes: peak memory and time of a step, each recipe traced as it is and no trace made twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.estimate import Margin, Tools, estimate, fit, join, unseen
from tightfit.planning.plan import Estimate, Time
from tightfit.planning.search.space import ALLOCATOR
from tightfit.planning.timing.inference_time import InferenceTime, inference_time
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.trace import Category, Trace

PASSES = frozenset({"forward", "backward", "prefill", "decode"})
"""Spans that grow with the micro-batch."""
HELD = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A resolved recipe and what it costs, from a trace of its own.

    passes, elsewhere: the most bytes allocated in forward and backward passes, and outside of them.
    held: bytes of weights, gradients and optimizer states as the optimizer begins. gradients: of these.
    passing: the most that the passes hold besides weights, their half-precision copies, gradients and states.
    parameters: numbers in the weights.
    events: ops and allocations in the trace.
    """

    recipe: Recipe
    estimate: Estimate
    passes: int
    elsewhere: int
    held: int
    gradients: int
    passing: int
    parameters: int
    events: int

    @property
    def speed(self) -> float:
        """Samples a second."""
        return self.estimate.time.samples_per_second

    @property
    def seconds(self) -> float:
        return self.estimate.time.step_seconds

    @property
    def fit_rank(self) -> int:
        """Rank of its fit: 0 with the margin to spare, 1 so after releasing cached memory, 2 without the margin, 3
        not at all."""
        memory = self.estimate.memory
        if self.estimate.safe:
            return 0 if memory.peak_reserved <= memory.capacity - memory.margin else 1
        return 2 if self.estimate.fits != "no" else 3


Progress = Callable[[int, int, str], None]
"""Called with how many traces are done, how many there are at most, and what comes next."""
Job = tuple[Recipe, Device]
Outcome = Evaluated | TightfitError


class Evaluator(Protocol):
    """Evaluates resolved recipes on devices, several side by side where it can."""

    side_by_side: int
    """Jobs that are best given at once."""

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The cost of each, in their order; the error of one that cannot be built or traced in its place."""


class Traces:
    """Predictions, each made once for GPUs of one compute capability, which is all of a GPU that a trace's ops and
    allocations depend on; what a trace does not show is each GPU's own."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._capability: tuple[int, int] | None = None
        self._traces: dict[str, Trace] = {}

    def __call__(self, recipe: Recipe, device: Device) -> Trace:
        if device.capability != self._capability:
            self._traces.clear()  # traces are large
            self._capability = device.capability
        key = recipe.model_copy(update={ALLOCATOR: False}).model_dump_json()
        if key not in self._traces:
            self._traces[key] = self._tools.predict(recipe, device)
            return self._traces[key]
        return self._tools.with_unseen(self._traces[key], recipe, device)


class InProcess:
    """An evaluator in this process, one recipe after the other."""

    side_by_side = 1

    def __init__(self, tools: Tools, margin: Margin | None = None) -> None:
        self.tools, self.margin = replace(tools, predict=Traces(tools)), margin or Margin()

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [self.one(recipe, device) for recipe, device in jobs]

    def one(self, recipe: Recipe, device: Device) -> Outcome:
        """Cost of one recipe, or the error that says why there is none."""
        try:
            return evaluate(recipe, device, self.tools, self.margin)
        except TightfitError as error:
            return error


def evaluate(recipe: Recipe, device: Device, tools: Tools, margin: Margin) -> Evaluated:
    """Cost of a resolved recipe on a device. Raises Refused and ModelError as predicting does."""
    trace = tools.predict(recipe, device)
    cost = _inference_estimate if recipe.mode == "inference" else estimate
    passes, elsewhere = _peaks(trace)
    held = _held(trace)
    weights = [a for a in trace.allocations if a.category is Category.WEIGHTS]
    return Evaluated(
        recipe=recipe, estimate=cost(trace, recipe, device, tools, margin), passes=passes, elsewhere=elsewhere,
        held=sum(held.values()), gradients=held[Category.GRADIENTS], passing=_passing(trace),
        parameters=sum(int(np.prod(a.shape, dtype=np.int64)) for a in weights),
        events=len(trace.ops) + len(trace.allocations),
    )  # fmt: skip


def _inference_estimate(trace: Trace, recipe: Recipe, device: Device, tools: Tools, margin: Margin) -> Estimate:
    timed = inference_time(trace, recipe, device, tools.step_time)
    return join(trace, fit(trace, device, tools, margin), _inference_time(recipe, timed), timed.notes)


def _inference_time(recipe: Recipe, timed: InferenceTime) -> Time:
    """A batch's time; its tokens are the generated ones, or those read where nothing is generated."""
    task = TASKS[recipe.task]
    tokens = recipe.seq_len if task.reads == "tokens" else 0
    if task.generates:
        tokens = recipe.inference.new_tokens
    return Time(
        step_seconds=timed.prefill_seconds + timed.decode_seconds, samples_per_second=timed.samples_per_second,
        tokens_per_second=timed.samples_per_second * tokens, mfu=0.0, calibrated=timed.calibrated,
        prefill_seconds=timed.prefill_seconds,
    )  # fmt: skip


def _peaks(trace: Trace) -> tuple[int, int]:
    """The most bytes allocated in the passes, and outside of them."""
    ticks, live = trace.curve()
    inside = np.zeros(len(ticks), dtype=bool)
    for span in trace.spans:
        if span.name in PASSES:
            inside |= (ticks >= span.start) & (ticks < span.stop)
    if not inside.any():
        inside[:] = True
    extra = unseen(trace, "allocator")
    return (int(np.max(live, where=inside, initial=0)) + extra, int(np.max(live, where=~inside, initial=0)) + extra)


def _held(trace: Trace) -> dict[Category, int]:
    step = trace.last_step()
    spans = [s for s in trace.spans if step is not None and s.step == step.step and s.name == "optimizer"]
    totals = trace.by_category(spans[0].start if spans else trace.peak()[0])
    return {category: totals[category] for category in HELD}


def _passing(trace: Trace) -> int:
    copies = ("aten._to_copy", "aten.to")
    passing = [a for a in trace.allocations
               if a.category not in HELD and not (a.category is Category.TEMPORARY and a.op.startswith(copies))]
    ends = [span for span in trace.spans if span.name in PASSES]
    start, stop = min((s.start for s in ends), default=0), max((s.stop for s in ends), default=None)
    return replace(trace, allocations=passing).peak(start, stop)[1]
