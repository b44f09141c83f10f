"""Whether a step fits the memory of a machine that trains on its processor, before it begins.

No framework can say there that memory ran out: the system ends the process, without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.host_memory import host_memory
from tightfit.models import read_config
from tightfit.planning.advice import smaller
from tightfit.planning.estimate import steps_alone, unseen
from tightfit.planning.search.search import COMPILED
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.shapes import Shape, shape_of
from tightfit.trace import Trace

SMALL = 0.25
"""The share of the free memory up to which a rough guess is enough."""


def check_memory(
    recipe: Recipe, device: Device, predict: Callable[[Recipe, Device], Trace], tell: Callable[[str], None]
) -> None:
    """Tell where a resolved recipe's step is predicted to take more memory than is free.

    Predicting takes seconds, so that a step that takes little by a rough guess is not predicted; nor is one that its
    backend would have to compile for it, nor a model whose configuration states no sizes. Raises Refused where it takes
    more than the machine has.
    """
    if device.kind != "cpu" or recipe.backend in COMPILED:
        return
    memory = host_memory()
    free = memory.available + memory.swap
    try:
        if rough_bytes(recipe, shape_of(read_config(recipe), recipe.task)) < SMALL * free:
            return
        trace = steps_alone(predict(recipe, device))
    except ModelError:
        return
    peak = trace.peak()[1] + unseen(trace, "allocator")
    advice = "; or ".join(smaller(recipe, device)[:2])
    if peak > memory.total + memory.swap:
        raise Refused(f"a step is predicted to take {size(peak)}, and this machine has {size(memory.total)}: the "
                      f"system would end the run. Write {advice}")
    if peak > free:
        tell(f"warning: a step is predicted to take {size(peak)}, and {size(free)} are free: the system may end the "
             f"run. Write {advice}")


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
