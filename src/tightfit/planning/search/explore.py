"""Exploring: best first among the combinations of a space, until none left can win by more than the clock's own error.

The mildest level of numerics is looked at first, a harsher one where the recipe allows it or nothing milder fits. What
is evaluated next is what can be fastest, by what was evaluated before and what techniques declare (see `forecast`); so
much is traced as it is, at a real micro-batch, and nothing that is shown is interpolated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence

from tightfit.errors import Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.defaults import default_micro_batch
from tightfit.planning.search.budget import TraceBudgetExceeded
from tightfit.planning.search.choose import choose, eligible_levels
from tightfit.planning.search.exploration import Exploration, Pair
from tightfit.planning.search.host_memory import filled, least_host_memory
from tightfit.planning.search.more_gpus import less_communication
from tightfit.planning.search.neighbors import compared, plainer, smaller, smallest, usual_at_least_memory
from tightfit.planning.search.probes import likeliest, probes_of, ruled_out
from tightfit.planning.search.space import Combination, Level

FIRST_TRIES = 4
"""Combinations that are tried until one can be built."""
THRIFTY_TRIES = 3
"""Combinations that are tried for the one that needs least memory, where nothing fits."""
OUT_OF_REACH = 1.5
"""Multiple of a device's memory that no combination is traced for at length: no forecast errs as much."""
LONG_TRACE = 50_000
"""Ops and allocations by which a trace may outgrow the first ones, as those of packed documents on a processor do."""


Neighbors = Callable[[Exploration, Pair], list[Pair]]
"""Pairs that may be a better choice than the present one, the likeliest first, whether evaluated or not."""


def explore(exploration: Exploration, compares: bool = True) -> None:
    """Evaluate until the choice stands, and then, with `compares`, what is shown beside it. Raises Refused or
    ModelError where nothing can be built."""
    _start(exploration)
    improvements: tuple[Neighbors, ...] = (
        usual_at_least_memory,  # which no forecast may say is enough
        _likeliest, plainer, smaller, smallest, filled, _likeliest_of_harsher, less_communication, _all_of_inference)
    try:
        for worst in (FitRank.SAFE, FitRank.TIGHT):
            _until_something_fits(exploration, worst)
            if choose(exploration, worst) is not None:
                break
        improve(exploration, improvements)
    except TraceBudgetExceeded:
        improvements = ()
        if left := len(probes_of(exploration, list(exploration.considered), FitRank.TIGHT)):
            exploration.notes.append(f"combinations that might be better and were not traced: {left:,}; the limit of "
                                     f"{exploration.budget.limit} traces was reached, compiled ones counting several")
    with contextlib.suppress(TraceBudgetExceeded):
        if choose(exploration) is None:
            _smallest_memory_first(exploration)
            every = exploration.space.combinations
            while choose(exploration) is None and (wanted := _new(exploration, _for_host_memory(exploration, every))):
                exploration.evaluate(wanted)
    exploration.budget.extend()
    if compares and (best := choose(exploration)) is not None:
        with contextlib.suppress(TraceBudgetExceeded):
            exploration.evaluate(_new(exploration, compared(exploration, best)))
            improve(exploration, (smaller, filled))
            if choose(exploration) != best:  # which may leave other room, and has neighbors of its own
                improve(exploration, improvements)


def _until_something_fits(exploration: Exploration, worst: FitRank) -> None:
    """Evaluate combinations of the mildest numerics, then of harsher ones, until one fits."""
    for level in exploration.space.levels:
        choices = _of_levels(exploration, [level])
        while choose(exploration, worst) is None:
            if wanted := _new(exploration, likeliest(exploration, choices, worst)):
                exploration.evaluate(wanted[: exploration.evaluator.side_by_side])
            elif worst.is_safe and (wanted := _new(exploration, _for_host_memory(exploration, choices))):
                exploration.evaluate(wanted)
            elif not exploration.assume_more_host_memory(choices, worst):
                break


def _for_host_memory(exploration: Exploration, choices: Sequence[Combination]) -> list[Pair]:
    """Pairs that may fit the host's memory too: the one that needs least of it, then those that leave most on the
    device, if that memory is known."""
    least = _new(exploration, least_host_memory(exploration, choices))
    return least or ([] if exploration.device.host_assumed else filled(exploration, None))


def improve(exploration: Exploration, neighbors: Sequence[Neighbors]) -> None:
    """Evaluate what may be better than the choice, until nothing is left that may."""
    while (best := choose(exploration)) is not None:
        wanted = next(filter(None, (_new(exploration, named(exploration, best)) for named in neighbors)), None)
        if wanted is None:
            return
        exploration.evaluate(wanted[: exploration.evaluator.side_by_side])


def _new(exploration: Exploration, pairs: Iterable[Pair]) -> list[Pair]:
    """Those of some pairs that were not evaluated, and that were not seen to be impossible."""
    return [pair for pair in pairs if pair not in exploration.found and pair[0] not in exploration.refused]


def _of_levels(exploration: Exploration, levels: Collection[Level]) -> list[Combination]:
    return [choice for choice in exploration.space.combinations if exploration.space.level(choice) in levels]


def _likeliest(exploration: Exploration, best: Pair) -> list[Pair]:
    """Pairs that may win with numerics as mild, or with harsher ones where those may be chosen for their speed."""
    rank = exploration.found[best].fit_rank
    mildest = min(exploration.space.level(choice) for (choice, _), found in exploration.found.items()
                  if found.fit_rank <= rank)
    return likeliest(exploration, _of_levels(exploration, eligible_levels(exploration, mildest)), rank)


def _likeliest_of_harsher(exploration: Exploration, best: Pair) -> list[Pair]:
    """Beside a choice whose blocks wait in host memory with results as they are, the mildest change of numerics with
    which they need not and that is faster."""
    space, found = exploration.space, exploration.found
    if exploration.keeps_numerics or not space.needs_by_block(best[0]):
        return []
    for level in space.harsher(space.level(best[0])):
        choices = [choice for choice in _of_levels(exploration, [level]) if not space.needs_by_block(choice)]
        own = set(choices)
        if any(each.fit_rank.is_safe for (choice, _), each in found.items() if choice in own):
            return []
        if wanted := likeliest(exploration, choices, FitRank.SAFE):
            return wanted
    return []


def _all_of_inference(exploration: Exploration, best: Pair) -> list[Pair]:
    """All that may generate, which is little, and all of it is shown."""
    training = exploration.space.recipe.mode == "train"
    return [] if training else [(choice, micro) for choice in exploration.space.combinations
                                if choice in exploration.considered for micro in exploration.sizes]


def _start(exploration: Exploration) -> None:
    """Evaluate the usual combination at two micro-batches; where it cannot be built, another kernel or format."""
    space = exploration.space
    at = default_micro_batch(space.recipe, space.device)
    high = max((size for size in exploration.sizes if size <= at), default=exploration.sizes[0])
    low = max((size for size in exploration.sizes if size <= high // 4), default=high)
    probes = [high] if space.recipe.backend.compiles_whole_steps else list(dict.fromkeys((low, high)))
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


def _smallest_memory_first(exploration: Exploration) -> None:
    """Evaluate what is likeliest to need least, where nothing is known to fit, until it is known: as declared, which is
    what `--longest` and `--largest` ask about, then as forecast."""
    batch, space = exploration.space.samples_per_device, exploration.space
    exploration.evaluate([(space.least_memory(space.quick(space.mildest)), exploration.sizes[0])])
    if choose(exploration) is not None:
        return
    ends = dict.fromkeys([exploration.sizes[0], *[size for size in exploration.sizes if size == batch]])
    exploration.considered.update(space.combinations)
    for _ in range(THRIFTY_TRIES):
        pairs = [(choice, micro) for choice in space.combinations for micro in ends
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
