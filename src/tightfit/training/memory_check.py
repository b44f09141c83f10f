"""Memory check of a run on a processor, before it begins.

No framework can say there that memory ran out: the system ends the process, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tightfit.backends.base import Backend
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.host_memory import host_memory
from tightfit.models import facts_of
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.shapes import Shape, shape_of

SMALL = 0.25
"""The share of the free memory up to which a rough guess is enough."""


def check_memory(recipe: Recipe, device: Device, backend: Backend, config: Any, log: Callable[[str], None]) -> None:
    """Say where a resolved recipe's step is predicted to take more memory than is free.

    config: of the recipe's model. Predicting takes seconds, so that a step that takes little by a rough guess is not
    predicted; nor is one that its backend would have to compile for it, nor a model whose configuration states no
    sizes, nor sequences that the model has no positions for, which its data refuses.
    Raises Refused where the step takes more than the machine has.
    """
    if device.kind != "cpu" or recipe.backend.compiles_whole_steps:
        return
    memory = host_memory()
    free, every = memory.available + memory.swap, memory.total + memory.swap
    try:
        if rough_bytes(recipe, shape_of(config, recipe.task)) < SMALL * free:
            return
        positions = facts_of(config, recipe).max_positions
        if positions is not None and recipe.seq_len > positions:
            return
        micro = recipe.micro_batch_size
        assert micro != "auto"
        peak_of = cache(lambda samples: _peak(recipe.override(micro_batch_size=samples), device, backend))
        peak = peak_of(micro)
        if peak <= free:
            return
        rooms = [free, every] if peak > every else [free]
        fits = next((fits for room in rooms if (fits := largest_that_fits(peak_of, micro, room))), None)
        advice = _advice(recipe, device, fits, peak_of(1))
    except ModelError:
        return
    if peak > every:
        raise Refused(f"a step is predicted to take {size(peak)}, and this machine has {size(memory.total)}: the "
                      f"system would end the run. {advice}")
    log(f"warning: a step is predicted to take {size(peak)}, and {size(free)} are free: the system may end the run. "
        f"{advice}")


def largest_that_fits(peak_of: Callable[[int], int], micro: int, room: int) -> int | None:
    """The largest half, quarter and so on of a micro-batch whose predicted peak fits `room` bytes; None where not even
    one sample does. Memory shrinks no faster than the micro-batch: what cannot fit by that is not predicted."""
    if peak_of(1) > room:
        return None
    peak, fits = peak_of(micro), micro // 2
    while fits > 1 and (peak * fits / micro > room or peak_of(fits) > room):
        fits //= 2
    return fits


def _peak(recipe: Recipe, device: Device, backend: Backend) -> int:
    """Bytes that a step is predicted to take."""
    from tightfit.planning.estimate import steps_alone, unseen

    trace = steps_alone(backend.predict(recipe, device))
    return trace.peak()[1] + unseen(trace, "allocator")


def _advice(recipe: Recipe, device: Device, fits: int | None, least: int) -> str:
    """Changes to write. fits: the micro-batch that fits; None for none. least: the bytes that one sample takes."""
    from tightfit.planning.savings import savings

    others = [str(saving) for saving in savings(recipe.override(micro_batch_size=1), device)]
    if fits is not None:
        advice = [f"micro_batch_size={fits} (the same global batch, more accumulation)", *others[:1]]
        return f"Write {'; or '.join(advice)}"
    why = f" (a single sample takes {size(least)})" if recipe.micro_batch_size != 1 else ""
    return f"No micro-batch is small enough{why}: write {'; or '.join([*others[:2], 'a smaller seq_len or model'])}"


def rough_bytes(recipe: Recipe, shape: Shape) -> float:
    """About the most that a step takes: with every score of attention, and all in fp32.

    A parameter's weight, gradient and states; 25 numbers of each layer and position; three for each pair of positions
    and head, of 32 features at least; four for each output.
    """
    assert recipe.micro_batch_size != "auto"
    assert recipe.optimizer != "auto"
    states = shape.parameters * (8 + recipe.optimizer.bytes_beside(None))
    samples, kept = recipe.micro_batch_size, 0
    for stack in shape.stacks:
        length = stack.positions or recipe.seq_len
        kept += stack.layers * (25 * length * stack.width + 3 * length**2 * max(stack.width // 32, 1))
    outputs = shape.head_products // max(shape.stacks[-1].width, 1)
    kept += 4 * outputs * (1 if shape.head_per_sample else recipe.seq_len)
    return states + 4.0 * samples * kept
