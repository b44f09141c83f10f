"""Costs of recipes: peak memory and time of a step, each recipe traced as it is and no trace made twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from tightfit.devices import Device
from tightfit.errors import ModelError, TightfitError
from tightfit.planning.costs import Estimate, FitRank
from tightfit.planning.estimate import Tools, estimate, step_cost
from tightfit.recipe import Recipe
from tightfit.trace import MODEL_STATES, Category, Trace

PASSES = frozenset({"forward", "backward", "prefill", "decode"})
"""Spans that grow with the micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A resolved recipe and what it costs, from a trace of its own.

    passes, outside: the most bytes allocated in forward and backward passes, and outside of them.
    held: bytes of weights, gradients and optimizer states as the optimizer begins. gradients: of these.
    parameters: numbers in the whole model's weights.
    events: ops and allocations in the trace.
    """

    recipe: Recipe
    estimate: Estimate
    passes: int
    outside: int
    held: int
    gradients: int
    parameters: int
    events: int

    @classmethod
    def of(cls, trace: Trace, recipe: Recipe, cost: Estimate, parameters: int) -> Self:
        """A resolved recipe's cost, from its trace. parameters: of the whole model."""
        ticks, live = trace.curve()
        inside = np.zeros(len(ticks), dtype=bool)
        for span in trace.spans:
            if span.name in PASSES:
                inside |= (ticks >= span.start) & (ticks < span.stop)
        if not inside.any():
            inside[:] = True
        extra, step = trace.untraced_bytes("allocator"), trace.last_step()
        updates = [] if step is None else trace.spans_of("optimizer", step.step)
        held = trace.by_category(updates[0].start if updates else trace.peak()[0])
        return cls(
            recipe=recipe, estimate=cost, passes=int(np.max(live, where=inside, initial=0)) + extra,
            outside=int(np.max(live, where=~inside, initial=0)) + extra,
            held=sum(held[category] for category in MODEL_STATES), gradients=held[Category.GRADIENTS],
            parameters=parameters,
            events=len(trace.ops) + len(trace.allocations),
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        return self.estimate.time.step_seconds

    @property
    def passes_when_accumulating(self) -> int:
        """`passes` of a step with more micro-batches, which hold gradients; those of a step's only one do not."""
        micro = self.recipe.micro_batch_size
        alone = micro != "auto" and micro >= self.recipe.parallel.of_one_process(self.recipe).batch_size
        return self.passes + (self.gradients if alone else 0)

    @property
    def fit_rank(self) -> FitRank:
        return self.estimate.fit_rank

    @property
    def fit_key(self) -> tuple[FitRank, float, int]:
        """Sort key, the best fit first: the rank, of one rank the time, of one time the allocator's reserved bytes."""
        return self.fit_rank, self.seconds, self.estimate.memory.peak_reserved if self.fit_rank.fits else 0


Progress = Callable[[int, int | None, str], None]
"""Called with how many things are done, how many there are, None where that is not known yet, and what comes next."""


def after(traces: int, progress: Progress | None) -> Progress | None:
    """The progress of what begins when so many traces were made, so that their count goes on."""
    if progress is None:
        return None
    return lambda done, total, text: progress(traces + done, None if total is None else traces + total, text)


Job = tuple[Recipe, Device]
Outcome = Evaluated | TightfitError


class Evaluator(Protocol):
    """Evaluates recipes, resolved but for the allocator's setting, on devices; several side by side where it can."""

    side_by_side: int
    """Jobs that are best given at once."""

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The cost of each, in their order; the error of one that cannot be built or traced in its place."""


class InProcess:
    """An evaluator in this process, one recipe after the other.

    Each prediction is made once for GPUs of one compute capability and for all settings of the allocator: a trace
    depends on no more of a GPU, but for what sums of columns take meanwhile, which is the first one's. What a trace
    does not show is each GPU's own.
    """

    side_by_side = 1

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self._capability: tuple[int, int] | None = None
        self._traces: dict[str, Trace] = {}

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [self.one(recipe, device) for recipe, device in jobs]

    def one(self, recipe: Recipe, device: Device) -> Outcome:
        """Cost of one recipe, or the error that says why there is none. Of the allocator's settings, where they are
        open, the usual one, unless the other fits better; beside offloading, the one that reserves less."""
        best: Evaluated | None = None
        try:
            trace = self.trace(recipe, device)
            timed = step_cost(trace, recipe, device, self.tools)
            for setting in (False, True) if recipe.expandable_segments == "auto" else (recipe.expandable_segments,):
                resolved = recipe.model_copy(update={"expandable_segments": setting})
                cost = estimate(trace, resolved, device, self.tools, timed)
                found = Evaluated.of(trace, resolved, cost, parameters_of(trace, resolved, self.tools))
                best = found if best is None or found.fit_key < best.fit_key else best
                memory = best.estimate.memory
                if memory.peak_allocated > memory.capacity:
                    break  # which no setting mends
                if memory.verdict == "yes" and not resolved.offloaded.uses_host:
                    break  # where host memory is used, shares go by what the allocator reserves at least
        except TightfitError as error:
            return error
        assert best is not None
        return best

    def trace(self, recipe: Recipe, device: Device) -> Trace:
        """The trace of a resolved recipe on a device. Raises Refused and ModelError as predicting does."""
        if device.capability != self._capability:
            self._traces.clear()  # traces are large
            self._capability = device.capability
        key = trace_key(recipe)
        if (trace := self._traces.get(key)) is not None:
            return replace(trace, untraced=self.tools.untraced(recipe, device, trace))
        self._traces[key] = self.tools.predict(recipe, device)
        return self._traces[key]


def trace_key(recipe: Recipe) -> str:
    """Cache key of a recipe's trace: every field but the allocator's setting, which changes no op and no tensor."""
    return repr(recipe.model_copy(update={"expandable_segments": False}))


def parameters_of(trace: Trace, recipe: Recipe, tools: Tools) -> int:
    """Numbers in the whole model's weights; where its size is not known, as a trace holds them."""
    with suppress(ModelError):  # of a model of the caller's own
        return tools.model_size(recipe).parameters
    weights = [a for a in trace.allocations if a.category is Category.WEIGHTS]
    parts = recipe.parallel.process_count if recipe.parallel.shards else 1
    return parts * sum(int(np.prod(a.shape, dtype=np.int64)) for a in weights)
