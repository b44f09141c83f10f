"""Exploring: best first among the combinations of a space, until none left can win by more than the clock's own error.

The mildest level of numerics is looked at first, a harsher one where the recipe allows it or nothing milder fits. What
is evaluated next is what can be fastest, by what was evaluated before and what techniques declare (see `forecast`); so
much is traced as it is, at a real micro-batch, and nothing that is shown is interpolated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tightfit.errors import Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.defaults import default_micro_batch
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.choose import choose, eligible_levels
from tightfit.planning.search.comparisons import usual_at_least_memory
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.forecast import FieldValue
from tightfit.planning.search.host_memory import evaluate_shares
from tightfit.planning.search.more_gpus import evaluate_communication
from tightfit.planning.search.probes import probes_of, ruled_out
from tightfit.planning.search.space import Combination, Level

FIRST_TRIES = 4
"""Combinations that are tried until one can be built."""
THRIFTY_TRIES = 3
"""Combinations that are tried for the one that needs least memory, where nothing fits."""
HOST_TRIES = 4
"""Combinations, each with its micro-batch, that are tried for one of which a host's memory is all that it lacks."""
FEW_TRACES = 20
"""Limit of traces below which one micro-batch of the usual combination has to do."""
OUT_OF_REACH = 1.5
"""Multiple of a device's memory that no combination is traced for at length: no forecast errs as much."""
LONG_TRACE = 50_000
"""Ops and allocations by which a trace may outgrow the first ones, as those of packed documents on a processor do."""


def explore(exploration: Exploration) -> None:
    """Evaluate until the choice stands. Raises Refused or ModelError where nothing can be built."""
    _start(exploration)
    try:
        for worst in (FitRank.SAFE, FitRank.TIGHT):
            _by_level(exploration, worst)
            if choose(exploration, FitRank.SAFE) is not None:
                break
        _try_simpler(exploration)
        _try_smallest(exploration)
        evaluate_shares(exploration)
        _evaluate_harsher(exploration)
        evaluate_communication(exploration)
        if exploration.space.recipe.mode == "inference":  # which has few, and all are shown
            exploration.evaluate([(choice, micro) for choice in exploration.considered for micro in exploration.sizes])
    except TraceBudgetExceeded:
        if left := len(probes_of(exploration, exploration.considered, FitRank.TIGHT)):
            exploration.notes.append(f"combinations that might be better and were not traced: {left:,}; the limit of "
                                     f"{exploration.budget.limit} traces was reached, compiled ones counting several")
    if choose(exploration) is None:
        with contextlib.suppress(TraceBudgetExceeded):
            _smallest_memory_first(exploration)
            _least_host_memory(exploration, exploration.space.combinations)
            evaluate_shares(exploration)
    exploration.budget.extend()


def _start(exploration: Exploration) -> None:
    """Evaluate the usual combination at two micro-batches; where it cannot be built, another kernel or format."""
    space = exploration.space
    at = default_micro_batch(space.recipe, space.device)
    high = max((size for size in exploration.sizes if size <= at), default=exploration.sizes[0])
    low = max((size for size in exploration.sizes if size <= high // 4), default=high)
    probes = [high] if exploration.budget.limit < FEW_TRACES else list(dict.fromkeys((low, high)))
    first = space.first
    starts = [choice for choice in space.combinations
              if len(space.differing(choice, first)) <= 1 and space.level(choice) == (0, 0)]
    starts.sort(key=lambda choice: (choice != first, choice != space.defaults,
                                    [space.fields.index(field) for field in space.differing(choice, first)]))
    for start in (starts or space.combinations)[:FIRST_TRIES]:
        exploration.evaluate([(start, micro) for micro in probes])
        if any(choice == start for choice, _ in exploration.found):
            exploration.unbuildable |= {(field, space.value(first, field))
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
    kept = [size for size in exploration.sizes if size <= high or each * (size - high) <= LONG_TRACE]
    if kept != exploration.sizes:
        exploration.notes.append(f"micro-batches above {kept[-1]} were not looked at: the larger they are, the longer "
                                 "their traces are here")
    exploration.sizes = kept


def _by_level(exploration: Exploration, worst: FitRank) -> None:
    """Find the mildest level that fits, and then the best of it and of the harsher ones that it lets in."""
    for level in exploration.space.levels:
        choices = _choices(exploration, [level])
        if not _search(exploration, choices, worst, first=True):
            if worst.is_safe:
                _least_host_memory(exploration, choices)
            if exploration.device.host_assumed:
                exploration.assume_more_host_memory(choices, worst)
            elif worst.is_safe and choose(exploration, worst) is None:
                evaluate_shares(exploration)
        if (best := choose(exploration, worst)) is not None:
            exploration.evaluate(usual_at_least_memory(exploration, best))  # which no forecast may say is enough
            _search(exploration, _choices(exploration, eligible_levels(exploration, level)), worst)
            return


def _evaluate_harsher(exploration: Exploration) -> None:
    """Evaluate, beside a choice whose blocks wait in host memory with results as they are, the mildest change of
    numerics with which they need not and that is faster. Raises TraceBudgetExceeded."""
    best, space = choose(exploration), exploration.space
    if best is None or exploration.keeps_numerics or not space.needs_by_block(best[0]):
        return
    for level in space.harsher(space.level(best[0])):
        choices = [choice for choice in _choices(exploration, [level]) if not space.needs_by_block(choice)]
        if _search(exploration, choices, FitRank.SAFE, first=True):
            return


def _choices(exploration: Exploration, levels: Sequence[Level]) -> list[Combination]:
    return [choice for choice in exploration.space.combinations if exploration.space.level(choice) in levels]


def _search(exploration: Exploration, choices: Sequence[Combination], worst: FitRank, first: bool = False) -> bool:
    """Evaluate what may win of some combinations, as many as go side by side, or, with `first`, until one of them fits;
    of those that go side by side each teaches something of its own. Whether any fits."""
    exploration.considered = list(dict.fromkeys([*exploration.considered, *choices]))
    own = set(choices)
    while True:
        fits = any(found.fit_rank <= worst for (choice, _), found in exploration.found.items() if choice in own)
        if first and fits:
            return True
        probes = sorted(probes_of(exploration, choices, worst),
                        key=lambda p: (p.fits, p.speed, -exploration.space.complexity(p.choice)), reverse=True)
        wanted: list[Pair] = []
        learned: set[FieldValue] = set()
        for probe in probes:
            if learned.isdisjoint(probe.unknown):
                wanted.append((probe.choice, probe.micro))
                learned.update(probe.unknown)
        if not wanted:
            return fits
        exploration.evaluate(wanted[: exploration.evaluator.side_by_side])


def _try_simpler(exploration: Exploration) -> None:
    """Evaluate the choice with each of its non-default values undone, where that may be as fast."""
    best = choose(exploration)
    if best is None:
        return
    space, rank = exploration.space, exploration.found[best].fit_rank
    for other in space.undone(best[0]):
        if (other, best[1]) in exploration.found or other in exploration.refused or not space.allows(other):
            continue
        forecast = exploration.forecasts.of(other).optimistic
        seconds = forecast.step_seconds(best[1], space.samples_per_device)
        speed = exploration.speed_at(seconds, space.recipe_for(other, best[1]))
        resident = other == space.without_offload(best[0])  # which copies less
        as_fast = resident or speed * (1 + CLOCK_ERROR) >= exploration.speed(best)
        if as_fast and exploration.fitting(forecast, [best[1]], rank):
            exploration.evaluate([(other, best[1])])


def _try_smallest(exploration: Exploration) -> None:
    """Evaluate the choice at the smallest micro-batch, whose tensors the device's cache may hold, and keep that where
    it is faster. Not of what is compiled, which passes fewer tensors on, nor of sweeps. Raises TraceBudgetExceeded."""
    best, space = choose(exploration), exploration.space
    if best is None or space.trace_cost(best[0]) > 1 or space.needs_by_block(best[0]):
        return
    found, pair = exploration.found[best], (best[0], exploration.sizes[0])
    if pair in exploration.found:
        return
    smallest = exploration.evaluate_one(space.recipe_for(*pair), f"micro_batch_size={pair[1]}")
    if (smallest is not None and smallest.fit_rank <= found.fit_rank
            and exploration.speed_of(smallest) > (1 + CLOCK_ERROR) * exploration.speed_of(found)):
        exploration.keep(pair, smallest)


def _least_host_memory(exploration: Exploration, choices: Sequence[Combination]) -> None:
    """Evaluate what is likeliest to need least of a host's memory, where that is too small for something."""
    space = exploration.space
    known = any(found.estimate.memory.host_missing for found in exploration.found.values())
    if not known and not exploration.device.host_assumed:
        return
    offloading = space.quick([choice for choice in choices
                              if space.offloaded_bytes_per_parameter(choice) and not ruled_out(exploration, choice)])
    for _ in range(HOST_TRIES):
        fitting = {}  # the device has to hold it, so that host memory is all that it lacks
        for choice in (choice for choice in offloading if choice not in exploration.refused):
            open_sizes = [size for size in exploration.sizes if (choice, size) not in exploration.found]
            if sizes := exploration.fitting(exploration.forecasts.of(choice).expected, open_sizes, FitRank.SAFE):
                fitting[choice] = sizes[-1]
        if not fitting:
            return
        offloaded = {choice: round(space.offloaded_bytes_per_parameter(choice), 1) for choice in fitting}
        fewest = [choice for choice in fitting if offloaded[choice] == min(offloaded.values())]
        pair = (least := space.least_memory(fewest, in_all=True), fitting[least])
        exploration.evaluate([pair])
        if pair in exploration.found and exploration.found[pair].estimate.memory.device_rank.is_safe:
            return


def _smallest_memory_first(exploration: Exploration) -> None:
    """Evaluate what is likeliest to need least, where nothing is known to fit, until it is known: as declared, which is
    what `--longest` and `--largest` ask about, then as forecast."""
    batch, space = exploration.space.samples_per_device, exploration.space
    exploration.evaluate([(space.least_memory(space.quick(space.mildest)), exploration.sizes[0])])
    if choose(exploration) is not None:
        return
    ends = dict.fromkeys([exploration.sizes[0], *[size for size in exploration.sizes if size == batch]])
    exploration.considered = exploration.space.combinations
    for _ in range(THRIFTY_TRIES):
        pairs = [(choice, micro) for choice in exploration.considered for micro in ends
                 if choice not in exploration.refused and not ruled_out(exploration, choice)]
        if not pairs:
            return
        forecasts = {pair: exploration.forecasts.of(pair[0]) for pair in pairs}
        least_bytes = min(forecasts[c, m].optimistic.peak(m, batch) for c, m in pairs)
        out_of_reach = least_bytes > OUT_OF_REACH * exploration.usable_bytes(FitRank.TIGHT)
        if out_of_reach:  # nothing fits by far, which the cheapest trace shows
            pairs = [pair for pair in pairs if exploration.space.trace_cost(pair[0]) == 1] or pairs
        least = min(pairs, key=lambda pair: forecasts[pair].expected.peak(pair[1], batch))
        if least in exploration.found:
            return
        exploration.evaluate([least])
        if out_of_reach:
            return
