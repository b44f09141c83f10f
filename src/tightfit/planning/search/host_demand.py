"""Demand of combinations for the host's memory, by which one that proved too much rules out others before a trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tightfit.planning.search.exploration import Exploration, Pair
from tightfit.planning.search.space import Combination
from tightfit.techniques import Offload

SWEEP_SLOTS = ("offload", "update", "accumulation")
"""Slots that decide how many micro-batches go through the blocks together."""


class HostDemand(NamedTuple):
    """Demand for the host's memory, to compare with another's: bytes of weights, gradients and states for each
    parameter; and what waits there for the backward pass, in samples that keep all."""

    states: float
    activations: float

    def at_least(self, other: HostDemand) -> bool:
        """Whether it is no less in either."""
        return self.states >= other.states and self.activations >= other.activations


def too_much_for_host(exploration: Exploration) -> list[HostDemand]:
    """The least demands that were seen to be too much for the host's memory."""
    if "offload" not in exploration.space.fields:
        return []
    found = set()
    for pair, evaluated in exploration.found.items():
        if (memory := evaluated.estimate.memory).host_missing:
            demand = host_demand(exploration, pair)
            found.add(demand._replace(activations=0.0) if memory.host_too_small else demand)
    return [one for one in found if not any(one is not other and one.at_least(other) for other in found)]


def host_holds(
    exploration: Exploration, choice: Combination, sizes: Sequence[int], lacking: Collection[HostDemand]
) -> list[int]:
    """The micro-batches of several whose demand may not be too much for the host's memory: it and the device's hold
    what is declared of weights, gradients and states, and it is below each of `lacking`, as `too_much_for_host`."""
    space, device = exploration.space, exploration.device
    if not device.host_bytes or not space.offloaded_bytes_per_parameter(choice):
        return list(sizes)
    held = space.bytes_per_parameter(space.without_offload(choice)) * exploration.forecasts.parameters
    if held > device.memory_bytes + device.host_bytes:
        return []
    return [size for size in sizes
            if not any(host_demand(exploration, (choice, size)).at_least(one) for one in lacking)]


def host_demand(exploration: Exploration, pair: Pair) -> HostDemand:
    """The demand that is declared of a combination at a micro-batch, where offloading is searched."""
    (choice, _), space = pair, exploration.space
    offload = space.value(choice, "offload")
    assert isinstance(offload, Offload)
    kept = offload.shares.activations * space.activation_share(space.without_offload(choice))
    return HostDemand(space.offloaded_bytes_per_parameter(choice), kept * _samples_together(exploration, pair))


def _samples_together(exploration: Exploration, pair: Pair) -> int:
    """Samples that go through the blocks together."""
    (choice, micro), space, known = pair, exploration.space, exploration.samples_together
    decide = tuple(technique for technique in choice if technique.slot in SWEEP_SLOTS)
    if (decide, micro) not in known:
        accumulation = space.recipe_for(choice, micro).accumulation
        assert accumulation != "auto"
        sweep = accumulation.sweep_of(-(-space.samples_per_device // micro))
        known[decide, micro] = min(sweep * micro, space.samples_per_device)
    return known[decide, micro]
