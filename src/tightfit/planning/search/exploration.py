"""The state of a search: what was evaluated, and what could not be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.estimate import Margin, beside_host
from tightfit.planning.largest import largest_that_fits
from tightfit.planning.search.budget import TraceBudget, TraceBudgetExceeded
from tightfit.planning.search.evaluate import Evaluated, Evaluator, Progress, trace_key
from tightfit.planning.search.forecast import CostModel, FieldValue, Forecasts
from tightfit.planning.search.space import Combination, Space
from tightfit.planning.search.wording import choices_text, size_field
from tightfit.planning.whole_run import startup
from tightfit.recipe import Recipe

CLOCK_ERROR = 0.05
"""The share by which predicted times of two recipes of one model have to differ for one to be called faster. Of pairs
that differ in one field, predicted and measured ratios are 5 to 6 % apart at the median (results/search_quality.json);
single times are off by 9 to 22 %."""
Pair = tuple[Combination, int]


class Exploration:
    """The evaluations of a search under way.

    found: what was evaluated, by combination and micro-batch. refused: what could not be built, and why. unbuildable:
    values that cannot be built in any combination. steps: of the run that the choice is for, which pays for what comes
    before its first step; 0 where its length is not known. keeps_numerics: never change them for speed. margin: of
    memory, on any GPU.
    """

    def __init__(
        self, space: Space, evaluator: Evaluator, budget: TraceBudget, *, margin: Margin, steps: int = 0,
        keeps_numerics: bool = False,
    ) -> None:  # fmt: skip
        self.space, self.evaluator, self.budget = space, evaluator, budget
        self.progress: Progress | None = None
        self.device, self.steps, self.keeps_numerics, self.margin = space.device, steps, keeps_numerics, margin
        self.found: dict[Pair, Evaluated] = {}
        self.refused: dict[Combination, str] = {}
        self.unbuildable: set[FieldValue] = set()
        self.failure: ModelError | None = None
        self.sizes = list(space.sizes)
        self.considered: set[Combination] = set()
        self.notes: list[str] = []
        self.over = True
        """Whether the search came to its own end, and not to Ctrl-C's."""
        self.follow_ups: list[tuple[Device, Evaluated]] = []
        """Evaluations for answers beside the choice, with the device that each is for."""
        self.samples_together: dict[Pair, int] = {}
        """Samples that go through the blocks together, by the techniques that decide it and the micro-batch."""
        self._forecasts: Forecasts | None = None

    @property
    def forecasts(self) -> Forecasts:
        """Forecasts fitted to all that was evaluated so far."""
        if self._forecasts is None:
            points: dict[Combination, dict[int, Evaluated]] = {}
            for (choice, micro), found in self.found.items():
                points.setdefault(choice, {})[micro] = found
            self._forecasts = Forecasts(self.space, points)
        return self._forecasts

    @property
    def decided_fields(self) -> tuple[str, ...]:
        """The fields that the search decides, for reading."""
        return (size_field(self.space.recipe), *self.space.fields)

    def usable_bytes(self, worst: FitRank) -> int:
        """Bytes for the allocator, less the margin where that is to stay free."""
        memory = next(iter(self.found.values())).estimate.memory
        return memory.capacity - (memory.margin if worst.is_safe else 0)

    def fitting(self, model: CostModel, sizes: Iterable[int], worst: FitRank) -> list[int]:
        """The micro-batches of several at which a forecast peak fits, with the least that an allocator reserves beyond
        it."""
        most = self.usable_bytes(worst) / self.forecasts.allocator_overhead
        return [micro for micro in sizes if model.peak(micro, self.space.samples_per_device) <= most]

    def speed(self, pair: Pair) -> float:
        """Speed of a pair that was evaluated, as `speed_of`."""
        return self.speed_of(self.found[pair])

    def speed_of(self, found: Evaluated) -> float:
        """Speed of what was evaluated, as `speed_at`."""
        return self.speed_at(found.seconds, found.recipe)

    def speed_at(self, seconds: float, recipe: Recipe) -> float:
        """Samples a second of a step; of a run, with what comes before its first step spread over its steps."""
        if self.steps:
            seconds += startup(recipe) / self.steps
        return self.space.recipe.batch_size / max(seconds, 1e-12)

    def has_room(self, pair: Pair) -> bool:
        """Whether what was evaluated keeps nothing in the host's memory and recomputes nothing, or holds little that
        could wait there, as beside frozen weights: blocks there would gain nothing."""
        recipe = self.found[pair].recipe
        return not recipe.offloaded.uses_host and (not recipe.recomputes or recipe.trainable.freezes)

    def evaluate(self, pairs: Iterable[Pair]) -> None:
        """Evaluate what was not, as much of it as may be traced. Raises TraceBudgetExceeded where that is nothing."""
        wanted: dict[Pair, Recipe] = {}
        for choice, micro in pairs:
            if (choice, micro) in self.found or choice in self.refused:
                continue
            recipe = self.space.recipe_for(choice, micro)
            known = [found for where, found in self.follow_ups if (where, found.recipe) == (self.device, recipe)]
            if known:
                self.found[choice, micro], self._forecasts = known[0], None
                continue
            try:
                self.count(recipe, choices_text(recipe, None, self.decided_fields))
            except TraceBudgetExceeded:
                if not wanted:
                    raise
                break
            wanted[choice, micro] = recipe
        outcomes = self.evaluator([(recipe, self.device) for recipe in wanted.values()]) if wanted else []
        for pair, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Evaluated):
                self.found[pair] = outcome
                continue
            if not isinstance(outcome, Refused | ModelError):
                raise outcome
            self.refused[pair[0]] = str(outcome)
            if isinstance(outcome, ModelError):
                self.failure = self.failure or outcome
            self._blame(pair[0])
        self._forecasts = None

    def assume_more_host_memory(self, choices: Collection[Combination], worst: FitRank) -> bool:
        """Assume, where a machine's memory is assumed, the next usual size with which one of some combinations fits
        that lacks nothing else. Whether that is more than before."""
        needed = [found.estimate.memory.host_needed for (choice, _), found in self.found.items()
                  if choice in choices and found.estimate.memory.device_rank <= worst]
        if not needed or not self.device.host_assumed:
            return False
        before, self.device = self.device, self.device.in_machine_with(min(needed))
        self.found = {pair: self.in_machine_of(self.device, found) for pair, found in self.found.items()}
        return self.device != before

    def in_machine_of(self, device: Device, found: Evaluated) -> Evaluated:
        """What was evaluated, as its host memory fits that of the machine of an equal device."""
        memory = beside_host(found.estimate.memory, device, self.margin)
        return replace(found, estimate=replace(found.estimate, memory=memory))

    def count(self, recipe: Recipe, text: str) -> None:
        """Report a recipe that is to be traced as `text`, and count it. Raises TraceBudgetExceeded where that is too
        much; something is evaluated all the same."""
        if self.found:
            self.budget.check()
        if self.progress is not None:
            self.progress(self.budget.made, None, f"now {text}")
        self.budget.take(recipe)

    def evaluate_one(self, recipe: Recipe, text: str, device: Device | None = None) -> Evaluated | None:
        """Cost of a resolved recipe, of the space or not, for an answer beside the choice; None where it cannot be
        built. Raises TraceBudgetExceeded."""
        there = device or self.device
        asked = trace_key(recipe)
        for where, found in [*((self.device, found) for found in self.found.values()), *self.follow_ups]:
            if where == there and trace_key(found.recipe) == asked:
                return found
        self.count(recipe, text)
        outcome = self.evaluator([(recipe, there)])[0]
        if not isinstance(outcome, Evaluated):
            return None
        self.follow_ups.append((there, outcome))
        return outcome

    def largest(self, recipe: Recipe, sizes: Sequence[int], *fields: str) -> Evaluated | None:
        """Cost of a resolved recipe with the largest of some sizes, of all of some fields, that fits with the margin;
        None where none does."""
        found: dict[int, Evaluated] = {}

        def needs(size: int) -> float:
            cost = self.evaluate_one(recipe.model_copy(update=dict.fromkeys(fields, size)), f"{fields[0]}={size}")
            if cost is None:
                return float("inf")
            found[size] = cost
            return cost.estimate.memory.demand

        with suppress(TraceBudgetExceeded):
            largest_that_fits(sizes, needs, self.device.memory_bytes)
        return found[max(safe)] if (safe := [size for size, cost in found.items() if cost.fit_rank.is_safe]) else None

    def _blame(self, choice: Combination) -> None:
        """Hold the one value against it in which a combination that cannot be built differs from one that can."""
        working = {c for c, _ in self.found}
        for other in working:
            fields = self.space.differing(choice, other)
            if len(fields) == 1:
                field, value = fields[0], self.space.value(choice, fields[0])
                if all(self.space.value(c, field) != value for c in working):
                    self.unbuildable.add((field, value))
