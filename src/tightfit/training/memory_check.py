"""Whether a step fits the memory of a machine that trains on its processor, before it begins.

No framework can say there that memory ran out: the system ends the process, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.estimate import steps_alone, unseen
from tightfit.planning.search.search import check_length
from tightfit.planning.suggestions import savings
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.trace import Trace

Predict = Callable[[Recipe, Device], Trace]


def check_memory(recipe: Recipe, device: Device, predict: Predict, tell: Callable[[str], None]) -> None:
    """Tell where a resolved recipe's step is predicted to take more memory than is free.

    Predicting takes seconds, so that a step that fits by a rough bound is not predicted; nor is one that its backend
    would have to compile for it. Raises Refused where it takes
    more than the machine has, and for a sequence that the model has no positions for.
    """
    if device.kind != "cpu" or recipe.backend.compiles_whole_steps:
        return
    memory = host_memory()
    free, every = memory.available + memory.swap, memory.total + memory.swap
    try:
        if rough_bytes(recipe) < free:
            return
        check_length(recipe)  # longer ones are no step to predict
        peak = _peak(recipe, device, predict)
        if peak <= free:
            return
        advice = _advice(recipe, device, predict, peak, [free, every] if peak > every else [free])
    except ModelError:
        return
    if peak > every:
        raise Refused(f"a step is predicted to take {size(peak)}, and this machine has {size(memory.total)}: the "
                      f"system would end the run. {advice}")
    tell(f"warning: a step is predicted to take {size(peak)}, and {size(free)} are free: the system may end the run. "
         f"{advice}")


def _peak(recipe: Recipe, device: Device, predict: Predict) -> int:
    """Bytes that a step is predicted to take."""
    trace = steps_alone(predict(recipe, device))
    return trace.peak()[1] + unseen(trace, "allocator")


def _advice(recipe: Recipe, device: Device, predict: Predict, peak: int, rooms: Sequence[int]) -> str:
    """What to write instead of a recipe that takes `peak` bytes: the largest halved micro-batch that is predicted to
    fit the first of `rooms` that one sample fits, in bytes; what else saves memory where none fits."""
    micro = recipe.micro_batch_size
    assert micro != "auto"
    one = recipe.override(micro_batch_size=1)
    least = peak if micro == 1 else _peak(one, device, predict)
    others = [str(saving) for saving in savings(one, device)]
    room = next((room for room in rooms if least <= room), None)
    if room is None:
        why = f" (a single sample takes {size(least)})" if micro > 1 else ""
        return f"No micro-batch is small enough{why}: write {'; or '.join([*others[:2], 'a smaller seq_len or model'])}"
    fits = micro // 2
    while fits > 1:
        at_least = peak * fits / micro  # memory shrinks no faster than the micro-batch
        if at_least <= room and _peak(recipe.override(micro_batch_size=fits), device, predict) <= room:
            break
        fits //= 2
    advice = [f"micro_batch_size={fits} (the same global batch, more accumulation)", *others[:1]]
    return f"Write {'; or '.join(advice)}"


def rough_bytes(recipe: Recipe) -> float:
    """A bound on what a step takes, as if every value that a forward pass makes were kept with its gradient, in fp32,
    attention's scores written out; infinite where that is not known. Raises ModelError for a model that cannot be
    built."""
    from tightfit.backends.pytorch.model_size import model_size

    assert recipe.micro_batch_size != "auto"
    assert recipe.optimizer != "auto"
    size = model_size(recipe)
    states = size.parameters * (8 + recipe.optimizer.bytes_beside(None))
    return states + 8.0 * recipe.micro_batch_size * size.values if size.values else math.inf
