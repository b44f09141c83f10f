"""Reasons of a plan, from what was evaluated: why its choice is, the next best, combinations that do not fit."""

from __future__ import annotations

from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.planning.costs import FitRank, Memory
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import SEGMENT_SECONDS, Tools
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.exploration import CLOCK_ERROR, Exploration, Pair
from tightfit.planning.search.neighbors import compared, usual_precision
from tightfit.planning.search.space import Combination
from tightfit.planning.search.wording import changing, choices_text
from tightfit.planning.whole_run import startup
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.text import counted, more_or_less, percent, seconds, size

SHOWN_CANDIDATES = 5
"""Candidates that fit and are shown, at most; as many that do not where none does."""
LEAST_SHARE = 0.0005
"""Share of a speed below which there is no difference."""


def ranked(exploration: Exploration) -> list[Evaluated]:
    """The choice, then the best of every combination, its own at another micro-batch among them, better fits before
    worse ones and the fastest first; among those shown the best of each milder level of numerics."""
    best = choose(exploration)
    if best is None:
        return []
    fitting = [pair for pair, found in exploration.found.items() if found.fit_rank.fits and pair != best]
    rest: list[Pair] = []
    for pair in sorted(fitting, key=lambda pair: _order(exploration, pair)):
        if all(pair[0] != other for other, _ in rest):
            rest.append(pair)
    milder = mildest(exploration, best)
    if milder in rest[SHOWN_CANDIDATES - 1 :]:
        rest.remove(milder)
        rest.insert(SHOWN_CANDIDATES - 2, milder)
    return [exploration.found[pair] for pair in (best, *rest)]


def _order(exploration: Exploration, pair: Pair) -> tuple[int, float]:
    return exploration.found[pair].fit_rank, -exploration.speed(pair)


def mildest(exploration: Exploration, best: Pair) -> Pair | None:
    """The best of the mildest level of numerics that fits as well as a choice of a harsher one; None where the choice
    is of the mildest."""
    worst = exploration.found[best].fit_rank
    fitting = [pair for pair, found in exploration.found.items() if found.fit_rank <= worst]
    level = min(exploration.space.level(choice) for choice, _ in fitting)
    alike = [pair for pair in fitting if exploration.space.level(pair[0]) == level]
    return None if best in alike else min(alike, key=lambda pair: _order(exploration, pair))


def too_large(exploration: Exploration) -> list[Evaluated]:
    """Combinations that do not fit, those that miss least first. Beside a choice: it at the next larger micro-batch,
    it with each departure undone, and its like in the usual precision; without one all that were evaluated, each where
    it needs least."""
    best = choose(exploration)
    large: dict[Combination, Evaluated] = {}
    if best is None:
        for (choice, _), found in exploration.found.items():
            if choice not in large or found.estimate.memory.demand < large[choice].estimate.memory.demand:
                large[choice] = found
        return sorted(large.values(), key=lambda found: found.estimate.memory.demand)[:SHOWN_CANDIDATES]
    near = nearest_in_usual_precision(exploration, best)
    pairs = dict.fromkeys([*compared(exploration, best), *([near] if near else [])])
    shown = [exploration.found[pair] for pair in pairs if pair in exploration.found]
    return sorted((found for found in shown if not found.fit_rank.fits), key=lambda found: found.estimate.missing)


def nearest_in_usual_precision(exploration: Exploration, best: Pair) -> Pair | None:
    """The evaluated combination of the usual precision that comes nearest to fitting, beside a choice that keeps
    numerics and has another precision, since the usual one leaves too little room. None elsewhere."""
    usual = usual_precision(exploration, best)
    near = [pair for pair in exploration.found if pair[0] in usual]
    least = min(near, key=lambda pair: exploration.found[pair].estimate.memory.used, default=None)
    fits = least is not None and exploration.found[least].fit_rank <= exploration.found[best].fit_rank
    return None if fits else least


def why(exploration: Exploration, best: Pair) -> list[str]:
    """Reasons for the choice."""
    found, space = exploration.found[best], exploration.space
    sentences, memory = [f"{_fastest(exploration, best)}."], found.estimate.memory
    if memory.drive:
        sentences.append(f"{size(memory.drive)} of each process wait on a drive.")
    if memory.verdict == "with-retries":
        sentences.append("It fits after the caching allocator has freed unused blocks, without which it would reserve "
                         f"{size(memory.peak_reserved)}; taking {counted(memory.taken_again, 'segment')} again is in "
                         f"the step's time, with {seconds(memory.taken_again * SEGMENT_SECONDS)} (assumed).")
    if found.fit_rank is FitRank.TIGHT:
        sentences.append("It leaves less than the safety margin, and nothing found leaves that much. Expect to be "
                         "close to the device's limit.")
    longest = max(value.startup_seconds for values in space.values.values() for value in values)
    if exploration.steps and longest > startup(found.recipe):
        sentences.append(f"Compared over {counted(exploration.steps, 'step')}, with the {longest:.0f} s or so that "
                         "compiling takes.")
    changed = space.numerics(found.recipe)
    if changed:
        spare = " with the safety margin" if found.fit_rank.is_safe else ""
        reason = "allow_numerics allows it" if space.recipe.allow_numerics else f"nothing fits{spare} otherwise"
        sentences.append(f"{changing(changed)} numerics: picked because {reason}.")
        milder = mildest(exploration, best)
        if milder is not None:
            other = exploration.found[milder]
            what = "changes them least of what fits" if space.numerics(other.recipe) else "leaves them unchanged"
            slower = percent(abs(faster_by(exploration.speed(milder), exploration.speed(best))))
            sentences.append(f"{choices_text(other.recipe, found.recipe)} {what}, and is {slower} slower.")
    sentences += [f"{note}." for technique in best[0] for note in technique.notes(found.recipe, space.device)]
    near = nearest_in_usual_precision(exploration, best)
    if near is not None:
        sentences.append(_why_not_usual_precision(exploration.found[near], found))
    return sentences


def figures(exploration: Exploration, best: Pair) -> str:
    """Speed and memory of the choice, as a sentence."""
    estimate, recipe = exploration.found[best].estimate, exploration.space.recipe
    memory, time, total = estimate.memory, estimate.time, exploration.device.memory_bytes
    quantity = f"{time.throughput:,.0f} {time.unit}"
    if recipe.mode == "inference":
        inputs = "prompts" if TASKS[recipe.task].generates else "samples"
        quantity = f"{time.step_seconds:.3g} s for {recipe.batch_size:,} {inputs}"
        if time.prefill_seconds < time.step_seconds:
            quantity += f", {time.prefill_seconds:.3g} s of it until the first token"
    context = " with CUDA context" if exploration.device.kind == "cuda" else ""
    host = f" and {size(memory.host)} of host memory" if memory.host_by_category else ""
    return (f"{quantity}, {size(min(memory.used, total))}{context} of {size(total)}{host}, at the peak in the "
            f"{memory.peak_in}.")


def _fastest(exploration: Exploration, best: Pair) -> str:
    """The set that the choice is the best of, as the beginning of a sentence."""
    found = exploration.found[best]
    if not exploration.space.fields and len(exploration.sizes) == 1:
        return "Every choice is pinned, and they fit"
    speed = exploration.speed
    faster = [pair for pair, other in exploration.found.items()
              if other.fit_rank.fits and faster_by(speed(pair), speed(best)) > 0]
    if not exploration.over:
        return "The fastest of those tried by then"
    if not faster:
        return "The fastest that fits"
    if min(exploration.found[pair].fit_rank for pair in faster) > found.fit_rank:
        return "The fastest that fits with the safety margin"
    level = exploration.space.level
    if all(level(pair[0]) > level(best[0]) for pair in faster):
        milder = "numerics as they are" if level(best[0]) == (0, 0) else "no greater change of numerics"
        return f"The fastest that fits with {milder}"
    return (f"The simplest of the fastest that fit: predicted times within {percent(CLOCK_ERROR)} of each other count "
            "as equal")


def _why_not_usual_precision(near: Evaluated, best: Evaluated) -> str:
    """The reason why nothing in the usual precision was chosen."""
    precision = near.recipe.precision
    assert precision != "auto"
    copies = "autocast keeps 16-bit copies of the weights beside the weights themselves" if precision.autocast else (
        "it needs more memory")
    memory, nothing = near.estimate.memory, f"Nothing fits in {precision.name}"
    by = f"misses {memory.lacking}"
    if near.fit_rank.fits:
        nothing = f"Nothing in {precision.name} leaves the safety margin"
        by = f"is {size(memory.peak_reserved - memory.capacity + memory.margin)} over it"
    return f"{nothing}: {copies}. The nearest, {choices_text(near.recipe, best.recipe)}, {by}."


def trade_off(exploration: Exploration, found: Evaluated, best: Evaluated) -> str:
    """Cost of another combination that fits against the choice, as a sentence."""
    memory = found.estimate.memory.peak_reserved - best.estimate.memory.peak_reserved
    faster = faster_by(exploration.speed_of(found), exploration.speed_of(best))
    speed = f"{percent(abs(faster))} {'faster' if faster > 0 else 'slower'}" if faster else "as fast"
    if exploration.steps and startup(found.recipe) != startup(best.recipe):
        speed += f" over {counted(exploration.steps, 'step')}, compiling counted"
    remarks = {"with-retries": "; it fits only after the caching allocator has freed unused blocks",
               "tight": "; it leaves less than the safety margin"}
    return (f"{choices_text(found.recipe, best.recipe)}: {speed}, {more_or_less(memory)} at the peak"
            f"{remarks.get(found.estimate.memory.verdict, '') or _why_not(exploration, found, best)}.")


def _why_not(exploration: Exploration, found: Evaluated, best: Evaluated) -> str:
    """The reason why what is faster, or as fast with less memory, is not the choice, as the end of a sentence; empty
    for what is neither."""
    space, memory, of_best = exploration.space, found.estimate.memory, best.estimate.memory
    share = faster_by(exploration.speed_of(found), exploration.speed_of(best))
    pairs = {id(each): pair for pair, each in exploration.found.items()}
    (choice, _), (chosen, _) = pairs[id(found)], pairs[id(best)]
    if share > 0 and space.level(choice) > space.level(chosen):
        return "; the choice changes numerics less"
    more = space.complexity(choice) - space.complexity(chosen)
    equal = f"; times within {percent(CLOCK_ERROR)} count as equal, and the choice"
    if abs(share) <= CLOCK_ERROR and more > 0 and (share > 0 or memory.peak_reserved < of_best.peak_reserved):
        return f"{equal} changes {counted(more, 'field')} fewer"
    if 0 < share <= CLOCK_ERROR and not more and of_best.used + of_best.host < memory.used + memory.host:
        return f"{equal} takes less memory, the host's included"
    return ""


def faster_by(speed: float, best: float) -> float:
    """Share by which a speed is above the choice's; 0 where that is too little to tell."""
    share = speed / best - 1 if best else 0.0
    return share if abs(share) >= LEAST_SHARE else 0.0


def memory_shortfall(name: str, memory: Memory) -> str:
    """Sentence on the memory that a combination of that name lacks."""
    if memory.host_missing and not memory.missing:
        there = "are assumed; write --host-memory SIZE for yours" if memory.host_assumed else "there are"
        return (f"{name} does not fit: it needs {size(memory.host)} of host memory, {size(memory.host_missing)} more "
                f"than {there}.")
    needed, used = size(memory.needed), size(memory.used)
    cached = f", {used} before the caching allocator frees unused blocks" if used != needed else ""
    return (f"{name} does not fit: it needs {needed}, {size(memory.missing)} more than there are{cached}; the peak is "
            f"in the {memory.peak_in}.")


def still_known(recipe: Recipe, device: Device, tools: Tools) -> str:
    """The end of a sentence on a model that cannot be traced: what its parameters take by the rules of thumb; nothing
    for one that cannot be built."""
    try:
        count = tools.model_size(recipe).parameters
    except ModelError:
        return ""
    recipe = resolve(recipe, device)
    assert recipe.precision != "auto"
    held, what = recipe.bytes_per_parameter, "weights, gradients and optimizer states"
    if recipe.mode == "inference":
        held, what = recipe.precision.weight_bytes, "weights"
    return (f"; what can still be said: {count:,} parameters, so about {size(round(held * count))} of {what}, before "
            "any activation")
