"""The space of a search: every combination of settings that `auto` considers, less what techniques refuse.

What a person pinned stays. A slot that says `auto` takes the settings that its variants offer on the device
(`Technique.search_settings`), and a new slot or variant joins by itself. Micro-batches are apart: each combination has
all of them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.defaults import fill_rest, resolve
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS, VARIANTS, Offload, Technique, default_for_slot, is_searched

Combination = tuple[Technique, ...]
"""A technique for each of `Space.fields`."""
Level = tuple[int, int]
"""Change of numerics of a combination: its harshest technique, then the sum of all."""
LAST_RESORT = 4
"""The `numerics_change` that is taken only where nothing milder fits: another learning rate is wanted."""
QUICK_TRACE = 2
"""Cost of a trace up to which it is quick: with optimizer states in host memory, and no compiled step."""
MOST_TOKENS = 1 << 17
"""Tokens of a micro-batch that nobody pinned, at most: larger ones are no faster."""


@dataclass(frozen=True)
class Space:
    """The combinations of one recipe on one device. recipe: as written. parameters: of its model; 0 where they are not
    known."""

    recipe: Recipe
    device: Device
    parameters: int = 0

    @cached_property
    def base(self) -> Recipe:
        """The recipe with what is not searched filled in. The allocator's setting stays open where a device has one:
        one trace serves both."""
        filled = fill_rest(self.recipe, self.device)
        caching = self.device.kind == "cuda" and self.recipe.backend.runs_torch and self.recipe.mode == "train"
        return filled.model_copy(update={"expandable_segments": self.recipe.expandable_segments}) if caching else filled

    @cached_property
    def values(self) -> Mapping[str, Sequence[Technique]]:
        """Values considered of each slot, the usual one first."""
        found: dict[str, Sequence[Technique]] = {}
        for slot, variants in SLOTS.items():
            pinned = getattr(self.recipe, slot)
            if pinned != "auto" and not pinned.left_open(self.device):
                found[slot] = [getattr(self.base, slot)]
                continue
            first = default_for_slot(self.recipe, self.device, slot)
            if first.trains_only and self.recipe.mode == "inference":
                found[slot] = [first]
                continue
            offered = [setting for kind in variants for setting in kind.search_settings(self.recipe, self.device)]
            found[slot] = [first, *(setting for setting in offered if setting != first)]
        if len(found["parallel"]) > 1:
            found["parallel"] = self._parallel_variants(found["parallel"])
        return found

    @property
    def is_divided(self) -> bool:
        """Whether the model has to be divided among devices: one does not hold its weights and gradients in 16 bits."""
        return 4 * self.parameters > self.device.memory_bytes

    def _parallel_variants(self, ways: Sequence[Any]) -> Sequence[Any]:
        """Ways to share a model among devices, the usual one first: one that divides it where a device does not hold it
        whole as usual, and that alone where none holds it."""
        memory = self.device.memory_bytes
        held = resolve(self.recipe, self.device).bytes_per_parameter * self.parameters
        if self.is_divided:
            return [way for way in ways if way.shards] or ways
        return sorted(ways, key=lambda way: way.shards is not (held > memory))

    @cached_property
    def samples_per_device(self) -> int:
        """Samples of a global batch for each device."""
        return -(-self.recipe.batch_size // self.device.world)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields with more than one value, or a knob that is left to the search: those of a `Combination`."""
        offload = self.recipe.offload
        refined = {offload.slot} if offload != "auto" and offload.open_shares else set()
        return tuple(field for field, values in self.values.items() if len(values) > 1 or field in refined)

    @cached_property
    def defaults(self) -> Combination:
        """The usual value of every field."""
        return tuple(self.values[field][0] for field in self.fields)

    @cached_property
    def first(self) -> Combination:
        """The combination that a search begins with: the usual value of every field, or the one that dominates it."""
        return tuple(self.dominating(field, value) or value
                     for field, value in zip(self.fields, self.defaults, strict=True))

    def dominating(self, field: str, value: Technique) -> Technique | None:
        """The value of a field that is declared to beat this one in memory and time, if there is one."""
        name = value.dominated_by.get(self.device.kind)
        return next((other for other in self.values[field] if other.name == name), None)

    @cached_property
    def combinations(self) -> list[Combination]:
        """The combinations that nothing refuses, plainest first. Raises Refused where there are none, with what stands
        against every one of them: pins that contradict each other."""
        found, refused = [], []
        for choice in itertools.product(*(self.values[field] for field in self.fields)):
            resolved = self.recipe_for(choice, 1)
            if any(technique.redundant(resolved, self.recipe) for technique in choice):
                continue
            if reasons := resolved.refusals(self.device):
                refused.append(reasons)
            else:
                found.append(choice)
        if not found:
            always = [reason for reason in refused[0] if all(reason in others for others in refused)]
            raise Refused("; ".join(always or refused[0]))
        return sorted(found, key=self.complexity)

    def allows(self, choice: Combination) -> bool:
        """Whether nothing refuses a combination of the space's values."""
        return choice in self._allowed

    @cached_property
    def _allowed(self) -> frozenset[Combination]:
        return frozenset(self.combinations)

    def recipe_for(self, choice: Combination, micro: int) -> Recipe:
        """The recipe of a combination at a micro-batch, resolved but for the allocator's setting."""
        fixed = {field: values[0] for field, values in self.values.items()}
        fixed.update(zip(self.fields, choice, strict=True))
        chosen = self.base.model_copy(update={**fixed, "micro_batch_size": micro})
        follow = {slot: default_for_slot(chosen, self.device, slot) for slot in self._followers}
        return chosen.model_copy(update=follow)

    @cached_property
    def _followers(self) -> list[str]:
        """Slots left to `auto` of which nothing is searched: they follow what is."""
        return [slot for slot in SLOTS if getattr(self.recipe, slot) == "auto" and not is_searched(slot)]

    def complexity(self, choice: Combination) -> int:
        """Number of fields in which a combination has neither the usual value nor the one that dominates it, and of
        settings that are never faster than others of theirs."""
        differing = sum(value not in usual for value, *usual in zip(choice, self.defaults, self.first, strict=True))
        return differing + len(self.preferred(choice))

    def undone(self, choice: Combination) -> list[Combination]:
        """The combination with each of its non-default values undone."""
        return [self.with_value(choice, field, first)
                for field, value, first in zip(self.fields, choice, self.defaults, strict=True) if value != first]

    def without_offload(self, choice: Combination) -> Combination:
        """The combination with nothing offloaded; itself where offloading is pinned."""
        field = "offload"
        return self.with_value(choice, field, self.values[field][0]) if field in self.fields else choice

    def needs_by_block(self, choice: Combination) -> bool:
        """Whether blocks wait in the host's memory, by a search's choice."""
        return any(isinstance(value, Offload) and value.shares.needs_by_block for value in choice)

    def value(self, choice: Combination, field: str) -> Technique:
        """A combination's value of a field."""
        return choice[self.fields.index(field)]

    def with_value(self, choice: Combination, field: str, value: Technique) -> Combination:
        """The combination with another value of one of its fields."""
        return tuple(value if name == field else own for name, own in zip(self.fields, choice, strict=True))

    def preferred(self, choice: Combination) -> list[Combination]:
        """The combination with each of its techniques in the setting that is never slower, `Technique.preferred`."""
        return [self.with_value(choice, field, first) for field, value in zip(self.fields, choice, strict=True)
                if (first := value.preferred) is not None and first in self.values[field]]

    def differing(self, one: Combination, other: Combination) -> list[str]:
        """The fields in which two combinations differ."""
        return [field for field, a, b in zip(self.fields, one, other, strict=True) if a != b]

    def distance(self, one: Combination, other: Combination) -> int:
        """The number of fields in which two combinations differ."""
        return sum(map(operator.ne, one, other))

    def level(self, choice: Combination) -> Level:
        """Change of numerics of a combination; values that a person pinned are not counted."""
        changes = [technique.numerics_change for technique in choice]
        return max(changes, default=0), sum(changes)

    @cached_property
    def levels(self) -> list[Level]:
        """The levels of numerics of all combinations, the mildest first."""
        return sorted(set(map(self.level, self.combinations)))

    def harsher(self, level: Level) -> list[Level]:
        """The levels of numerics beyond one, the mildest first, but those that are a last resort."""
        return [other for other in self.levels if level < other and other[0] < LAST_RESORT]

    @property
    def mildest(self) -> list[Combination]:
        """The combinations of the mildest level of numerics."""
        return [choice for choice in self.combinations if self.level(choice) == self.levels[0]]

    def numerics(self, recipe: Recipe) -> tuple[str, ...]:
        """Values picked that change results, as `field=value`."""
        picked = (getattr(recipe, field) for field in self.fields)
        return tuple(f"{technique.slot}={technique.name}" for technique in picked if technique.numerics_change)

    def least_memory(self, choices: Sequence[Combination], in_all: bool = False) -> Combination:
        """The one of several combinations that is likeliest to need least memory, or, `in_all`, least of the device's
        and the host's together: by what the model holds, and where that is as good as the same, as of adapters alone,
        by what is kept for the backward pass."""
        def held(choice: Combination) -> float:
            return self.bytes_per_parameter(self.without_offload(choice) if in_all else choice)

        return min(choices, key=lambda c: (round(held(c), 1), self.activation_share(c), self.complexity(c)))

    def cheap(self, choices: Sequence[Combination]) -> list[Combination]:
        """Combinations that no trace is cheaper than: nothing compiled, nothing in host memory."""
        return [choice for choice in choices if self.trace_cost(choice) == 1]

    def quick(self, choices: Sequence[Combination]) -> Sequence[Combination]:
        """Combinations that are quick to trace; all of them where none is."""
        return [choice for choice in choices if self.trace_cost(choice) <= QUICK_TRACE] or choices

    def least_memory_recipe(self, micro: int | None = None) -> Recipe:
        """The recipe that is likeliest to need least memory with numerics as mild as they can be, one that is quick to
        trace where there is one. micro: its micro-batch, the smallest by default."""
        return self.recipe_for(self.least_memory(self.quick(self.mildest)), micro or self.sizes[0])

    def activation_share(self, choice: Combination) -> float:
        """The share of what the heaviest techniques keep for the backward pass, as declared."""
        return math.prod(technique.kept_share for technique in choice)

    def bytes_per_parameter(self, choice: Combination) -> float:
        """Bytes of weights, gradients and optimizer states on the device, as declared."""
        held = self.states(choice)
        if held not in self._bytes:
            self._bytes[held] = self.recipe_for(choice, 1).bytes_per_parameter
        return self._bytes[held]

    @cached_property
    def _bytes(self) -> dict[Combination, float]:
        return {}

    def offloaded_bytes_per_parameter(self, choice: Combination) -> float:
        """Bytes of weights, gradients and optimizer states in the host's memory, as declared."""
        return self.bytes_per_parameter(self.without_offload(choice)) - self.bytes_per_parameter(choice)

    def states(self, choice: Combination) -> Combination:
        """The part of a combination that decides what weights, gradients and optimizer states hold."""
        return tuple(technique for technique in choice if technique.changes_states)

    def trace_cost(self, choice: Combination) -> int:
        """Cost of its trace, in traces of the plainest combination."""
        return max([trace_cost(self.base), *(int(technique.trace_cost) for technique in choice)])

    @cached_property
    def sizes(self) -> list[int]:
        """The micro-batches worth trying, ascending: the pinned one, or one of each octave up to the global batch."""
        batch = self.samples_per_device
        if self.recipe.mode == "inference":
            return [batch]
        if self.recipe.micro_batch_size != "auto":
            return [self.recipe.micro_batch_size]
        sizes = sizes_to_try(batch)
        return [micro for micro in sizes if micro * self.recipe.seq_len <= MOST_TOKENS] or sizes[:1]


def trace_cost(recipe: Recipe) -> int:
    """Cost of a resolved recipe's trace, in traces of the plainest combination."""
    return max(int(technique.trace_cost) for slot in VARIANTS if (technique := getattr(recipe, slot)) != "auto")


def sizes_to_try(batch: int) -> list[int]:
    """Ascending: between each power of two and the one below, the largest divisor of a global batch, multiples of 8
    first, else the power; a half, a third, and all of it."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0] if batch <= 1 << 20 else [batch]
    found = {1, batch}
    power = 2
    while power < batch:
        inside = [d for d in divisors if power // 2 < d <= power]
        found.add(max(inside, key=lambda d: (d % 8 == 0, d), default=power))
        power *= 2
    found |= {batch // parts for parts in (2, 3) if batch % parts == 0}
    return sorted(found)
