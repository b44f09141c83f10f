"""Host memory in a search: shares of blocks that stay on the device, and a plan's sentences on what waits there."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tightfit.planning.costs import FitRank
from tightfit.planning.host_shares import KINDS, fill_device
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.host_demand import host_demand
from tightfit.planning.search.probes import ruled_out
from tightfit.planning.search.space import Combination
from tightfit.planning.search.wording import choices_text
from tightfit.techniques.offload import STREAMED, Offload
from tightfit.text import size


def filled(exploration: Exploration, best: Pair | None) -> list[Pair]:
    """The choice, or else what is nearly as fast, with so much of its blocks on the device as that has room for, where
    its copies are waited for; without a choice, so all that lacks host memory alone."""
    space, pairs = exploration.space, list[Pair]()
    if "offload" not in space.fields:
        return pairs
    asked = space.recipe.offload
    kinds = KINDS if asked == "auto" else asked.open_shares
    for choice, micro in exploration.found if best is None else _nearly_as_fast(exploration, best):
        if space.value(choice, "offload") in space.values["offload"]:
            offload = worth_filling(exploration.found[choice, micro], kinds)
            if offload is not None:
                pairs.append((space.with_value(choice, "offload", offload), micro))
    return pairs if best is None else pairs[:1]


def least_host_memory(exploration: Exploration, choices: Collection[Combination]) -> list[Pair]:
    """The combination likeliest to need least of a host's memory, of some that the device holds, where that memory is
    too small for something: at the largest micro-batch, and where fewer samples go through the blocks together."""
    space, found = exploration.space, exploration.found
    known = any(each.estimate.memory.host_missing for each in found.values())
    if not known and not exploration.device.host_assumed:
        return []
    offloading = space.quick([choice for choice in choices
                              if space.offloaded_bytes_per_parameter(choice) and not ruled_out(exploration, choice)])
    too_large = {pair for pair, each in found.items() if not each.estimate.memory.device_rank.is_safe}
    fitting = {}
    for choice in (choice for choice in offloading if choice not in exploration.refused):
        sizes = [size for size in exploration.sizes if (choice, size) not in too_large]
        if sizes := exploration.fitting(exploration.forecasts.of(choice).expected, sizes, FitRank.SAFE):
            fitting[choice] = sizes
    if not fitting:
        return []
    offloaded = {choice: round(space.offloaded_bytes_per_parameter(choice), 1) for choice in fitting}
    fewest = [choice for choice in fitting if offloaded[choice] == min(offloaded.values())]
    least = space.least_memory(fewest, in_all=True)
    pairs = [(least, size) for size in reversed(fitting[least])]
    device, states = exploration.device, space.offloaded_bytes_per_parameter(least) * exploration.forecasts.parameters
    if device.host_assumed or states > device.host_bytes:  # which grows to what is fast, or is too small for any
        return pairs[:1]
    return list(dict.fromkeys([pairs[0], min(pairs, key=lambda pair: host_demand(exploration, pair))]))


def _nearly_as_fast(exploration: Exploration, best: Pair) -> list[Pair]:
    """The choice, then what is nearly as fast with numerics no harsher, the fastest first: it may leave more room."""
    found, speed, level = exploration.found, exploration.speed, exploration.space.level
    near = [pair for pair in found if pair != best and found[pair].fit_rank <= found[best].fit_rank
            and level(pair[0]) <= level(best[0]) and speed(pair) * (1 + CLOCK_ERROR) >= speed(best)]
    return [best, *sorted(near, key=speed, reverse=True)]


def worth_filling(found: Evaluated, kinds: Collection[str]) -> Offload | None:
    """The offloading of what was evaluated with so much of some kinds on the device as that has room for; None where
    nothing is offloaded, as beside fsdp's own, where host memory suffices and copies are not waited for, and where
    there is no room."""
    offload, memory, copies = found.recipe.offload, found.estimate.memory, found.estimate.time.copies
    waits = copies is not None and copies.speed < 1 - CLOCK_ERROR
    if offload == "auto" or not offload.shares.uses_host or not (memory.host_missing or waits):
        return None
    return fill_device(offload, memory, kinds)


def notes_on_host_memory(exploration: Exploration, best: Pair) -> Iterator[str]:
    """Notes on a choice that keeps something in host memory."""
    space, found = exploration.space, exploration.found[best]
    if "offload" not in space.fields or not found.recipe.offloaded.uses_host:
        return
    if not any(other.fit_rank.fits and not other.recipe.offloaded.needs_by_block
               for other in exploration.found.values()):
        fields = choices_text(found.recipe, None, tuple(STREAMED))
        yield (f"nothing fits with all of the model in the GPU's memory: with {fields}, part of it waits in the "
               "host's; write offload=none for what would help without")
    milder = space.level(best[0]) == space.levels[0] != space.levels[-1]
    if milder and not space.recipe.allow_numerics and not space.recipe.trainable.freezes:
        yield ("optimizer states wait in the host's memory with results as they always are; allow_numerics=true "
               "also considers 8-bit states and 16-bit weights, which may fit without and be faster")


def enough_host_memory(exploration: Exploration) -> str:
    """The least memory of the host with which something would fit that lacks nothing else, as a sentence; empty where
    there is none."""
    device = exploration.device
    short = [found for found in exploration.found.values()
             if found.estimate.memory.host_missing and not found.estimate.memory.missing]
    if not short:
        return ""
    least = min(short, key=lambda found: found.estimate.memory.host_needed)
    fields = choices_text(least.recipe, None, ("precision", "optimizer", *STREAMED))
    return (f"{size(least.estimate.memory.host_needed)} of host memory would do, of which {device.name}'s machine has "
            f"{size(device.host_bytes)}: with {fields}, it fits.")
