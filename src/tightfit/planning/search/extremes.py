"""The most of something that fits a device: the longest sequence, the largest micro-batch, the largest model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from tightfit.backends.measurements import ModelSize
from tightfit.bundled import BUNDLED
from tightfit.devices import Device
from tightfit.errors import RecipeError, Refused, TightfitError, nearest
from tightfit.garbage import gc_paused
from tightfit.model_facts import model_facts
from tightfit.planning.largest import largest_that_fits
from tightfit.planning.plan import Largest
from tightfit.planning.search.evaluate import Evaluated, Evaluator, Progress
from tightfit.planning.search.space import Space
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.text import size

LENGTH_STEP = 128
"""Tokens of which the lengths that are asked about are multiples."""
FINEST_STEP = 64
"""A length over the tokens to the next one, at most: finer than what is known of memory on a card."""
MOST_GROWTH = 4
"""Multiple of a step's gradients that its other samples take at most for one micro-batch of them all to be tried."""
LONGEST_LENGTH = 1 << 20
"""Tokens up to which lengths are asked about where the model's positions have no end."""


def candidates(recipe: Recipe, asked: str, model_size: Callable[[Recipe], ModelSize]) -> dict[int, Recipe]:
    """The recipe with each value of what is asked about, by a size in which memory does not fall, but for the last
    micro-batch's.

    asked: `seq_len`, `micro_batch_size`, or `model=PATTERN` of bundled names. Raises RecipeError for anything else.
    """
    field, _, pattern = asked.partition("=")
    if field == "seq_len" and not pattern:
        if TASKS[recipe.task].reads != "tokens":
            raise RecipeError(f"longest: {recipe.task} has no seq_len; write --largest micro_batch_size")
        most = model_facts(recipe).max_positions or LONGEST_LENGTH
        if TASKS[recipe.task].predicts == "next":  # whose rows need no padding mask: one document, as long as the row
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"packing": False})})
        return {length: recipe.model_copy(update={"seq_len": length}) for length in _lengths(most)}
    if field == "micro_batch_size" and not pattern:
        sizes = range(1, recipe.batch_size + 1)
        return {micro: recipe.model_copy(update={"micro_batch_size": micro}) for micro in sizes}
    if field == "model" and pattern:
        named = [recipe.override(model=name, task=BUNDLED[name].task) for name in models_like(pattern)]
        return dict(sorted(((model_size(each).parameters, each) for each in named), key=lambda pair: pair[0]))
    raise RecipeError(f"longest, largest: {asked!r} is not seq_len, micro_batch_size, or model= and a pattern of "
                      "bundled names, such as --largest 'model=qwen2.5-*'")


def _lengths(most: int) -> Iterator[int]:
    if most <= LENGTH_STEP:
        yield from range(1, most)
    length = LENGTH_STEP
    while length < most:
        yield length
        length += LENGTH_STEP * max(1, length // (LENGTH_STEP * FINEST_STEP))
    yield most


def models_like(pattern: str) -> list[str]:
    """The bundled models of a pattern such as `qwen3-*`. Raises RecipeError where there are none."""
    names = [name for name in BUNDLED if fnmatchcase(name, pattern)]
    if not names:
        raise RecipeError(f"largest: model={pattern} is the name of no bundled model; "
                          + nearest(pattern.rstrip("*-"), BUNDLED))
    return names


@gc_paused()
def find_largest(
    asked: str, recipes: Mapping[int, Recipe], device: Device, evaluator: Evaluator, progress: Progress | None = None
) -> tuple[Recipe, Largest]:
    """The recipe with the largest value that fits with the margin free, by a trace of each one's recipe of least
    memory, and that as a sentence; with the smallest value where not even that does. Blocks wait in
    host memory where that is open and has room for them. Raises TightfitError where none of them can be traced."""
    field, found, failures = asked.partition("=")[0], dict[int, Evaluated](), list[TightfitError]()
    traces = 0

    def evaluated(recipe: Recipe) -> Evaluated | TightfitError:
        nonlocal traces
        traces += 1
        return evaluator([(recipe, device)])[0]

    def least(recipe: Recipe) -> Evaluated | TightfitError:
        space = Space(recipe, device)
        outcome = evaluated(space.least_memory_recipe())
        if isinstance(outcome, Evaluated) and space.sizes[-1] == recipe.batch_size and _alone_may_do(outcome):
            alone = evaluated(space.least_memory_recipe(recipe.batch_size))
            return min(outcome, alone, key=_demand) if isinstance(alone, Evaluated) else outcome
        return outcome

    def may_hold(value: int, resident: Recipe) -> bool:
        """Whether the device may hold it without blocks in host memory: by what is declared, and by smaller values."""
        parameters = value if field == "model" else next((each.parameters for each in found.values()), 0)
        needy = (size for size, each in found.items() if each.recipe.offloaded.uses_host or not each.fit_rank.is_safe)
        grows = field != "micro_batch_size"  # of which the last needs less
        return (Space(resident, device).least_memory_recipe().bytes_per_parameter * parameters <= room
                and not (grows and any(size <= value for size in needy)))

    def needs(value: int) -> float:
        if progress is not None:
            progress(traces, None, f"now whether {field}={getattr(recipes[value], field)} would do")
        recipe, outcomes = recipes[value], list[Evaluated | TightfitError]()
        asked = [recipe.override(offload="none"), recipe] if recipe.offload == "auto" else [recipe]
        for each in asked:  # the one without blocks in host memory first, whose trace is much shorter
            if each is not recipe and not may_hold(value, each):
                continue
            try:
                outcomes.append(least(each))
            except Refused as error:
                outcomes.append(error)
            if isinstance(outcomes[-1], Evaluated) and outcomes[-1].fit_rank.is_safe:
                break
        possible = [outcome for outcome in outcomes if isinstance(outcome, Evaluated)]
        failures.extend(outcome for outcome in outcomes if isinstance(outcome, TightfitError))
        if not possible:
            return float("inf")
        found[value] = min(possible, key=_demand)
        return _demand(found[value])

    sizes, room = list(recipes), device.memory_bytes
    # A step's only micro-batch finds no gradients, and may need less than a smaller one. Long sequences trace slowly.
    best = largest_that_fits(sizes, needs, room, largest_first=field != "seq_len")
    if not found:
        raise failures[0]
    value = sizes[0] if best is None else best
    shown = getattr(recipes[value], field)
    return recipes[value], Largest(field=field, value=None if best is None else shown, traces=traces,
                                   text=_sentence(field, recipes, sizes, best, found))


def _alone_may_do(found: Evaluated) -> bool:
    """Whether one micro-batch of the whole global batch, which finds no gradients of earlier ones, may fit where this
    does not: by an upper bound of what its samples take, as if temporary tensors grew with them too."""
    others = found.recipe.batch_size - found.recipe.resolved_micro_batch
    return not found.fit_rank.is_safe and 0 < others * (found.passes - found.held) < MOST_GROWTH * found.gradients


def _demand(found: Evaluated) -> float:
    """Bytes that tell how far a size is from one that just fits: no more than there are where it fits. What tensors
    take grows evenly from size to size, where what the allocator takes of a card that is full does not."""
    memory = found.estimate.memory
    there, tensors = memory.capacity + memory.context, memory.peak_allocated + memory.context + memory.margin
    return min(tensors, there) if memory.fit_rank.is_safe else max(tensors, there + max(memory.host_missing, 1))


def _sentence(
    field: str, recipes: Mapping[int, Recipe], sizes: Sequence[int], best: int | None, found: Mapping[int, Evaluated],
) -> str:  # fmt: skip
    def written(value: int) -> str:
        shown = getattr(recipes[value], field)
        return f"{field}={shown}"

    def takes(value: int) -> str:
        memory = found[value].estimate.memory
        host = f", and {size(memory.host_missing)} more than the host has" if memory.host_missing else ""
        there = memory.capacity + memory.context  # before it has more in use, the allocator gives cached memory back
        tight = memory.fit_rank.fits and not memory.fit_rank.is_safe
        margin = f", which leaves less than the safety margin of {size(memory.margin)}" if tight else ""
        return size(min(memory.used, there) if memory.fit_rank.fits else memory.needed) + host + margin

    above = min((value for value in found if best is None or value > best), default=None)
    if best is None:
        taken = f": it takes {takes(above)}" if above is not None else ""
        return f"Not even {written(sizes[0])} fits with the lowest-memory settings{taken}."
    most = {"seq_len": "the model takes no more", "micro_batch_size": "batch_size is no more",
            "model": "none of them is larger"}
    end = f"; {written(above)} would take {takes(above)}" if above is not None else f", and {most[field]}"
    alone = ", a document a row (data.packing=false)" * (not recipes[best].data.packing)
    return f"{written(best)} fits with the lowest-memory settings, {takes(best)} in use{alone}{end}."
