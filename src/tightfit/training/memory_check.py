"""Memory check of a run on a processor, before it begins.

No framework can say there that memory ran out: the system ends the process, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from tightfit.backends.base import Backend
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.model_facts import facts_of
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.text import size


def check_memory(recipe: Recipe, device: Device, backend: Backend, config: Any, log: Callable[[str], None]) -> None:
    """Check of a resolved recipe's predicted step against free memory, which warns.

    config: of the recipe's model. Predicting takes seconds, so that a step that fits by a rough bound is not predicted;
    nor is one that its backend would have to compile for it, or whose weights are divided among processes. Raises
    Refused where the step takes more than the machine has, and for sequences that the model has no positions for.
    """
    if device.kind != "cpu" or recipe.backend.compiles_whole_steps or recipe.parallel.shards:
        return
    memory = host_memory()
    free, every = memory.available + memory.swap, memory.total + memory.swap
    try:
        if rough_bytes(recipe, backend, config) * recipe.parallel.process_count < free:
            return
        facts_of(config, recipe).check_length(recipe.seq_len)
        micro = recipe.micro_batch_size
        assert micro != "auto"
        peak_of = cache(lambda samples: _peak(recipe.override(micro_batch_size=samples), device, backend))
        peak = peak_of(micro)
        if peak <= free:
            return
        from tightfit.planning.largest import largest_that_fits

        halves = [micro >> shift for shift in range(micro.bit_length() - 1, 0, -1)]
        rooms = [free, every] if peak > every else [free]
        fits = next((fits for room in rooms if (fits := largest_that_fits(halves, peak_of, room))), None)
        advice = _advice(recipe, device, fits, peak_of(1))
    except ModelError:
        return
    if peak > every:
        raise Refused(f"a step is predicted to take {size(peak)}, and this machine has {size(memory.total)}: the "
                      f"system would end the run. {advice}")
    log(f"warning: a step is predicted to take {size(peak)}, and {size(free)} are free: the system may end the run. "
        f"{advice}")


def _peak(recipe: Recipe, device: Device, backend: Backend) -> int:
    """Bytes that a step is predicted to take, in all processes."""
    from tightfit.planning.estimate import steps_alone, untraced

    trace = steps_alone(backend.predict(recipe, device))
    return (trace.peak()[1] + untraced(trace, "allocator")) * recipe.parallel.process_count


def _advice(recipe: Recipe, device: Device, fits: int | None, least: int) -> str:
    """Changes to write. fits: the micro-batch that fits; None for none. least: the bytes that one sample takes."""
    from tightfit.planning.suggestions import savings

    others = [str(saving) for saving in savings(recipe.override(micro_batch_size=1), device)]
    if fits is not None:
        advice = [f"micro_batch_size={fits} (the same global batch, more accumulation)", *others[:1]]
        return f"Write {'; or '.join(advice)}"
    why = f" (a single sample takes {size(least)})" if recipe.micro_batch_size != 1 else ""
    return f"No micro-batch is small enough{why}: write {'; or '.join([*others[:2], 'a smaller seq_len or model'])}"


def rough_bytes(recipe: Recipe, backend: Backend, config: Any = None) -> float:
    """A bound on what a step takes, as if every value that a forward pass makes were kept with its gradient, in fp32,
    attention's scores written out; infinite where that is not known. Raises ModelError for a model that cannot be
    built."""
    assert recipe.micro_batch_size != "auto"
    assert recipe.optimizer != "auto"
    found = backend.model_size(recipe, config)
    states = found.parameters * (8 + recipe.optimizer.bytes_beside(None))
    return states + 8.0 * recipe.micro_batch_size * found.values if found.values else math.inf
