"""Exploring: best first among the combinations of a space, until none left can win by more than the clock's own error.

The mildest level of numerics is looked at first, a harsher one where the recipe allows it or nothing milder fits. What
is evaluated next is what can be fastest, by what was evaluated before and what techniques declare (see `forecast`); so
much is traced as it is, at a real micro-batch, and nothing that is shown is interpolated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tightfit.errors import Refused
from tightfit.planning.defaults import default_micro_batch
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.choose import admits_harsher, choose
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair, worst_rank
from tightfit.planning.search.forecast import FieldValue
from tightfit.planning.search.host_memory import evaluate_shares
from tightfit.planning.search.more_gpus import evaluate_communication
from tightfit.planning.search.probes import dominated, probes_of
from tightfit.planning.search.space import LAST_RESORT, QUICK, Combination, Level

FIRST_TRIES = 4
"""Combinations that are tried until one can be built."""
OUT_OF_REACH = 1.5
"""Multiple of a device's memory that no combination is traced for at length: no forecast errs as much."""
LONGER = 50_000
"""Ops and allocations by which a trace may outgrow the first ones, as those of packed documents on a processor do."""


def explore(exploration: Exploration) -> None:
    """Evaluate until the choice stands. Raises Refused or ModelError where nothing can be built."""
    _start(exploration)
    try:
        for with_margin in (True, False):
            _by_level(exploration, with_margin)
            if choose(exploration, with_margin=True) is not None:
                break
        _try_simpler(exploration)
        evaluate_shares(exploration)
        _evaluate_harsher(exploration)
        evaluate_communication(exploration)
        if exploration.space.recipe.mode == "inference":  # which has few, and all are shown
            exploration.evaluate([(choice, micro) for choice in exploration.considered for micro in exploration.sizes])
    except TraceBudgetExceeded:
        with_margin = choose(exploration, with_margin=True) is not None
        if left := len(probes_of(exploration, exploration.considered, with_margin)):
            exploration.notes.append(f"combinations that might be better and were not traced: {left:,}; the limit of "
                                     f"{exploration.budget.limit} traces was reached")
    if choose(exploration) is None:
        with contextlib.suppress(TraceBudgetExceeded):
            _smallest_memory_first(exploration)
            _least_host_memory(exploration)
            evaluate_shares(exploration)
    exploration.budget.extend()


def _start(exploration: Exploration) -> None:
    """Evaluate the usual combination at two micro-batches; where it cannot be built, another kernel or format."""
    space = exploration.space
    at = default_micro_batch(space.recipe, space.device)
    high = max((size for size in exploration.sizes if size <= at), default=exploration.sizes[0])
    low = max((size for size in exploration.sizes if size <= high // 4), default=high)
    probes = [high] if exploration.budget.limit < 20 else list(dict.fromkeys((low, high)))
    first = space.first
    starts = [choice for choice in space.combinations
              if len(space.differing(choice, first)) <= 1 and space.level(choice) == (0, 0)]
    starts.sort(key=lambda choice: (choice != first, choice != space.defaults,
                                    [space.fields.index(field) for field in space.differing(choice, first)]))
    for start in (starts or space.combinations)[:FIRST_TRIES]:
        exploration.evaluate([(start, micro) for micro in probes])
        if any(choice == start for choice, _ in exploration.found):
            exploration.unbuildable |= {(field, first[space.fields.index(field)])
                                        for field in space.differing(start, first) if first in exploration.refused}
            _drop_long_traces(exploration)
            return
    if exploration.failure is not None:
        raise exploration.failure
    raise Refused("; ".join(list(dict.fromkeys(exploration.refused.values()))[:3]))


def _drop_long_traces(exploration: Exploration) -> None:
    """Leave out micro-batches whose traces would be far longer than those that were made."""
    known = {micro: found.events for (_, micro), found in exploration.found.items()}
    low, high = min(known), max(known)
    each = max(known[high] - known[low], 0) / max(high - low, 1)
    kept = [size for size in exploration.sizes if size <= high or each * (size - high) <= LONGER]
    if kept != exploration.sizes:
        exploration.notes.append(f"micro-batches above {kept[-1]} were not looked at: the larger they are, the longer "
                                 "their traces are here")
    exploration.sizes = kept


def _by_level(exploration: Exploration, with_margin: bool) -> None:
    """Find the mildest level that fits, and then the best of it and of the harsher ones that it lets in."""
    levels = exploration.levels
    for number, level in enumerate(levels):
        _search(exploration, _choices(exploration, [level]), with_margin, first=True)
        if choose(exploration, with_margin) is None:
            continue
        harsher = [other for other in levels[number + 1 :] if other[0] < LAST_RESORT]
        harsher = harsher if admits_harsher(exploration, level) else []
        _search(exploration, _choices(exploration, [level, *harsher]), with_margin)
        return


def _evaluate_harsher(exploration: Exploration) -> None:
    """Evaluate, beside a choice whose blocks wait in host memory with results as they are, the mildest change of
    numerics with which they need not and that is faster. Raises TraceBudgetExceeded."""
    best, space = choose(exploration), exploration.space
    if best is None or exploration.keeps_numerics or not exploration.found[best].recipe.offloaded.needs_by_block:
        return
    for level in exploration.levels:
        if space.level(best[0]) < level and level[0] < LAST_RESORT:
            choices = [choice for choice in _choices(exploration, [level])
                       if not space.recipe_for(choice, 1).offloaded.needs_by_block]
            if _search(exploration, choices, with_margin=True, first=True):
                return


def _choices(exploration: Exploration, levels: Sequence[Level]) -> list[Combination]:
    return [choice for choice in exploration.space.combinations if exploration.space.level(choice) in levels]


def _search(exploration: Exploration, choices: Sequence[Combination], with_margin: bool, first: bool = False) -> bool:
    """Evaluate what may win of some combinations, as many as go side by side, or, with `first`, until one of them fits;
    of those that go side by side each teaches something of its own. Whether any fits."""
    space, worst = exploration.space, worst_rank(with_margin)
    exploration.considered = list(dict.fromkeys([*exploration.considered, *choices]))
    own = set(choices)
    while True:
        fits = any(found.fit_rank <= worst for (choice, _), found in exploration.found.items() if choice in own)
        if first and fits:
            return True
        probes = sorted(probes_of(exploration, choices, with_margin),
                        key=lambda p: (p.fits, p.speed, -space.non_defaults(p.choice)), reverse=True)
        wanted: list[Pair] = []
        taught: set[FieldValue] = set()
        for probe in probes:
            if taught.isdisjoint(probe.unknown):
                wanted.append((probe.choice, probe.micro))
                taught.update(probe.unknown)
        if not wanted:
            return fits
        exploration.evaluate(wanted[: exploration.evaluator.side_by_side])


def _try_simpler(exploration: Exploration) -> None:
    """Evaluate the choice with each of its non-default values undone, where that may be as fast."""
    best = choose(exploration)
    if best is None:
        return
    space, usable = exploration.space, exploration.usable_bytes(exploration.found[best].fit_rank.is_safe)
    batch = space.samples_per_device
    for other in space.undone(best[0]):
        if (other, best[1]) in exploration.found or other in exploration.refused or not space.allows(other):
            continue
        forecast = exploration.forecasts.of(other).best
        speed = exploration.speed_of(forecast.step_seconds(best[1], batch), space.recipe_for(other, best[1]))
        resident = other == space.without_offload(best[0])  # which copies less
        as_fast = resident or speed * (1 + CLOCK_ERROR) >= exploration.speed(best)
        if as_fast and forecast.peak(best[1], batch) * exploration.allocator_overhead <= usable:
            exploration.evaluate([(other, best[1])])


def _least_host_memory(exploration: Exploration) -> None:
    """Evaluate what is likeliest to need least of a host's memory, where that is too small for something."""
    space = exploration.space
    if not any(found.estimate.memory.host_missing for found in exploration.found.values()):
        return
    offloading = [choice for choice in space.combinations if space.offloaded_bytes_per_parameter(choice)
                  and space.trace_cost(choice) <= QUICK and not dominated(exploration, choice)]
    if not offloading:
        return
    least = min(offloading, key=lambda c: (space.bytes_per_parameter(space.without_offload(c)),
                                           space.activation_share(c), space.non_defaults(c)))
    batch, sizes = space.samples_per_device, exploration.sizes
    while sizes:  # the device has to hold it, so that host memory is all that it lacks
        forecast = exploration.forecasts.of(least).likely
        sizes = [micro for micro in sizes if forecast.peak(micro, batch) <= exploration.usable_bytes(with_margin=True)]
        if sizes:
            exploration.evaluate([(least, sizes[-1])])
            found = exploration.found.get((least, sizes.pop()))
            sizes = sizes if found is not None and found.estimate.memory.missing else []


def _smallest_memory_first(exploration: Exploration) -> None:
    """Evaluate what is likeliest to need least, where nothing is known to fit, until it is known."""
    batch = exploration.space.samples_per_device
    ends = dict.fromkeys([exploration.sizes[0], *[size for size in exploration.sizes if size == batch]])
    exploration.considered = exploration.space.combinations
    for _ in range(3):
        pairs = [(choice, micro) for choice in exploration.considered for micro in ends
                 if choice not in exploration.refused and not dominated(exploration, choice)]
        if not pairs:
            return
        forecasts = {pair: exploration.forecasts.of(pair[0]) for pair in pairs}
        least_bytes = min(forecasts[c, m].best.peak(m, batch) for c, m in pairs)
        out_of_reach = least_bytes > OUT_OF_REACH * exploration.usable_bytes(False)
        if out_of_reach:  # nothing fits by far, which the cheapest trace shows
            pairs = [pair for pair in pairs if exploration.space.trace_cost(pair[0]) == 1] or pairs
        least = min(pairs, key=lambda pair: forecasts[pair].likely.peak(pair[1], batch))
        if least in exploration.found:
            return
        exploration.evaluate([least])
        if out_of_reach:
            return
