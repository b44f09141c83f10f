"""What a combination can at best be, before it is traced: so that a search traces only what may win.

- Checkpointing adds work: a step takes no less than without it. No kind needs less memory than every-block: what a
  segment recomputes at once outweighs the inputs that it does not keep, in models of fewer than some hundred blocks.
- Weights, gradients and states lie in memory together, whatever the forward pass does.
- Full precision saves mixed precision's copies of the weights, and nothing else.
- Another optimizer changes its states and its own step, nothing else.
- What a kind of checkpointing saves and costs in one family of passes (a precision, a compiler) it saves and costs in
  another about as well. This one is no law, so only 70 % of the cost and 85 % of what it keeps are counted on; and of
  what a step without a compiler tells about one with it, 20 % and 75 %, for a compiler keeps less itself, and computes
  again what it fuses at little cost.
- A compiler makes a step no more than FASTER times as fast, and of what a step holds besides weights, gradients and
  states it spares no more than three quarters.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.planning.search.candidates import Config
from tightfit.planning.search.probing import Prober
from tightfit.techniques.checkpointing import EveryBlock, Segments
from tightfit.techniques.compile import NoCompile
from tightfit.techniques.precision import Fp32

COST_CARRIED, SAVING_CARRIED = 0.7, 0.85
"""The share of another family's slowdown, and of what it keeps in memory, that is taken for granted."""

COST_COMPILED, SAVING_COMPILED = 0.2, 0.75
"""The same between steps of which one is compiled."""

FASTER, SPARED = 4, 0.75
"""How many times as fast a compiler makes a step at most, and the share of its passing memory that it spares at most.
"""

CARRIED, UNKNOWN = 0.95, 0.85
"""What is likely to be reached of a bound that another family tells, and of one that nothing does."""


class Bounds:
    """Bounds of what `prober` does not know yet; what it knows, exactly."""

    def __init__(self, prober: Prober) -> None:
        self.prober = prober
        self._optimizer_seconds: dict[Config, float] = {}

    def speed(self, config: Config, *, spare: bool) -> float:
        """Samples a second at most, at a micro-batch that can fit; 0 where none can."""
        prober = self.prober
        room = prober.room(spare=spare)
        fitting = [micro for micro in prober.sizes if self.peak(config, micro) * prober.rounding <= room]
        if not fitting:
            return 0.0
        seconds = min(self.seconds(config, micro) for micro in fitting[-2:])
        return prober.recipe.batch_size / seconds if seconds > 0 else float("inf")

    def peak(self, config: Config, micro: int) -> int:
        """Bytes allocated at the peak, at least."""
        prober, resident = self.prober, self.prober.resident(config)
        if prober.knows(config):
            return prober.peak(config, micro)
        plain = prober.plain[config.family]
        if not prober.knows(plain):
            return max(resident, self._from_half(config, micro), self._compiled_peak(config, micro))
        reference = prober.reference(config)
        saved = max(prober.resident(reference) - resident, 0)
        if prober.knows(reference):
            return max(prober.peak(reference, micro) - saved, resident)
        least = resident
        floor = reference.with_checkpointing(EveryBlock())
        if prober.knows(floor):
            least = max(least, prober.peak(floor, micro) - saved)
        carried = []
        for other in self._siblings(reference) or self._siblings(floor):
            base, other_plain = prober.resident(other), prober.plain[other.family]
            without = prober.peak(other_plain, micro) - base
            kept = (prober.peak(other, micro) - base) / without if without > 0 else 0.0
            here = prober.peak(plain, micro) - prober.resident(reference)
            share = SAVING_CARRIED if other.compiled == config.compiled else SAVING_COMPILED
            carried.append(resident + round(share * min(kept, 1.0) * here))
        return max(least, min(carried, default=0))

    def _compiled_peak(self, config: Config, micro: int) -> int:
        """Bytes at the peak of a compiled step, at least, from what is known of it without a compiler."""
        plain = self._known_uncompiled(config)
        if plain is None:
            return 0
        resident = self.prober.resident(config)
        return resident + round((1 - SPARED) * max(self.peak(plain, micro) - resident, 0))

    def _known_uncompiled(self, config: Config) -> Config | None:
        """The combination without its compiler, where something is known of that family."""
        plain = replace(config, compile=NoCompile())
        known = config.compiled and plain.family in self.prober.plain
        return plain if known and self.prober.knows(self.prober.plain[plain.family]) else None

    def _from_half(self, config: Config, micro: int) -> int:
        """Bytes at the peak in full precision, at least, from mixed precision: less its copies of the weights."""
        prober, least = self.prober, 0
        if not isinstance(config.precision, Fp32):
            return 0
        for plain in prober.plain.values():
            half = (plain.attention, plain.compile) == (config.attention, config.compile) and plain.precision.name in (
                "fp16", "bf16")
            if half and plain.update == config.update:
                for kind in (config.checkpointing, EveryBlock()):
                    other = plain.with_checkpointing(kind)
                    if prober.knows(other):
                        least = max(least, prober.peak(other, micro) - 2 * prober.parameters)
        return least

    def seconds(self, config: Config, micro: int) -> float:
        """Seconds of a step, at least."""
        prober = self.prober
        if prober.knows(config):
            return prober.seconds(config, micro)
        plain = prober.plain[config.family]
        if not prober.knows(plain):
            uncompiled = self._known_uncompiled(config)
            return 0.0 if uncompiled is None else self.seconds(uncompiled, micro) / FASTER
        reference = prober.reference(config)
        update = self._saved_by_optimizer(config, reference, plain)
        if prober.knows(reference):
            return max(prober.seconds(reference, micro) - update, 0.0)
        least = prober.seconds(plain, micro)
        floor = reference.with_checkpointing(EveryBlock())
        slower = []
        for other in self._siblings(reference):
            cost = prober.seconds(other, micro) / prober.seconds(prober.plain[other.family], micro) - 1
            slower.append(cost * (COST_CARRIED if other.compiled == config.compiled else COST_COMPILED))
        least *= 1 + max(min(slower, default=0.0), 0.0)
        if isinstance(config.checkpointing, Segments) and prober.knows(floor):
            least = max(least, prober.seconds(floor, micro))  # the same is computed again
        return max(least - update, 0.0)

    def _siblings(self, config: Config) -> list[Config]:
        """The same checkpointing in other families, where it and the family's plain one are known."""
        prober = self.prober
        found = []
        for family, plain in prober.plain.items():
            other = plain.with_checkpointing(config.checkpointing)
            if family != config.family and other != plain and prober.knows(plain) and prober.knows(other):
                found.append(other)
        return found

    def certainty(self, config: Config) -> float:
        """How much of its bound a combination is likely to reach: less where nothing of its checkpointing is known."""
        reference = self.prober.reference(config)
        if self.prober.knows(reference) or not self.prober.knows(self.prober.plain[config.family]):
            return 1.0
        return CARRIED if self.carried(config) else UNKNOWN

    def carried(self, config: Config) -> bool:
        """Whether another family tells how this kind of checkpointing does."""
        return bool(self._siblings(self.prober.reference(config)))

    def _saved_by_optimizer(self, config: Config, reference: Config, plain: Config) -> float:
        """Seconds that another optimizer saves at most: it still reads gradients and writes weights, so only what its
        states are smaller by is saved."""
        if config == reference:
            return 0.0
        if plain not in self._optimizer_seconds:
            self._optimizer_seconds[plain] = self.prober.optimizer_seconds(plain)
        others = 3 * config.precision.weight_bytes  # a parameter: the gradient read, the weight read and written
        mine, its = (2 * c.optimizer.bytes_beside(c.precision.weight_rounding) for c in (config, reference))
        return self._optimizer_seconds[plain] * (1 - (others + min(mine, its)) / (others + its))
