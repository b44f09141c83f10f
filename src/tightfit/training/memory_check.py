"""Memory check of a run before it begins: on a processor of all that it takes, and beside a GPU of the blocks that wait
in the host's memory, which is page-locked, so that the system can move none of it to disk.

No framework can say there that memory ran out: the system ends the process, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from tightfit.backends.base import Backend
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.model_facts import facts_of
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.text import size

if TYPE_CHECKING:
    from tightfit.planning.costs import Memory

MOST_NAMED = 2
"""Changes that are named at once, each of which fits."""


def check_memory(recipe: Recipe, device: Device, backend: Backend, config: Any, log: Callable[[str], None]) -> None:
    """Check of a resolved recipe's predicted step against the machine's free memory, which warns.

    config: of the recipe's model. Predicting takes seconds, so that a step that fits by a rough bound is not predicted;
    nor is one on a processor that its backend would have to compile for it, or whose weights are divided among
    processes. Raises Refused where the step takes more than the machine has, beside a GPU also more than its control
    group or the limits on this process leave of it, and for sequences that the model has no positions for.
    """
    with suppress(ModelError):
        if device.kind != "cpu":
            if recipe.offloaded.uses_host:
                _check_beside_gpu(recipe, device, backend, config, log)
        elif not (recipe.backend.compiles_whole_steps or recipe.parallel.shards):
            _check_on_processor(recipe, device, backend, config, log)


def _check_on_processor(
    recipe: Recipe, device: Device, backend: Backend, config: Any, log: Callable[[str], None]
) -> None:
    memory = host_memory()
    free, every = memory.available + memory.swap, memory.total + memory.swap
    if rough_bytes(recipe, backend, config) * recipe.parallel.process_count < free:
        return
    facts_of(config, recipe).check_length(recipe.seq_len)
    micro = recipe.resolved_micro_batch
    peak_of = cache(lambda samples: _peak(recipe.override(micro_batch_size=samples), device, backend))
    peak = peak_of(micro)
    if peak <= free:
        return
    from tightfit.planning.largest import halvings, largest_that_fits

    rooms = [free, every] if peak > every else [free]
    fits = next((fits for room in rooms if (fits := largest_that_fits(halvings(micro), peak_of, room))), None)
    advice = _advice(recipe, device, fits, peak_of(1))
    if peak > every:
        raise Refused(f"a step is predicted to take {size(peak)}, and this machine has {size(memory.total)}: the "
                      f"system would end the run. {advice}")
    log(f"warning: a step is predicted to take {size(peak)}, and {size(free)} are free: the system may end the run. "
        f"{advice}")


def _peak(recipe: Recipe, device: Device, backend: Backend) -> int:
    """Bytes that a step is predicted to take, in all processes."""
    from tightfit.planning.estimate import steps_alone

    trace = steps_alone(backend.predict(recipe, device))
    return (trace.peak()[1] + trace.untraced_bytes("allocator")) * recipe.parallel.process_count


def _advice(recipe: Recipe, device: Device, fits: int | None, least: int) -> str:
    """Changes to write. fits: the micro-batch that fits; None for none. least: the bytes that one sample takes."""
    from tightfit.planning.suggestions import savings

    others = [str(saving) for saving in savings(recipe.override(micro_batch_size=1), device)]
    if fits is not None:
        advice = [f"micro_batch_size={fits} (the same global batch, more accumulation)", *others[:1]]
        return f"Write {'; or '.join(advice)}"
    why = f" (a single sample takes {size(least)})" if recipe.micro_batch_size != 1 else ""
    return f"No micro-batch is small enough{why}: write {'; or '.join([*others[:2], 'a smaller seq_len or model'])}"


def _check_beside_gpu(
    recipe: Recipe, device: Device, backend: Backend, config: Any, log: Callable[[str], None]
) -> None:
    memory = host_memory()
    whole = recipe.override(micro_batch_size=recipe.batch_size)  # what all micro-batches keep waits at once
    if rough_bytes(whole, backend, config) < memory.available:
        return
    from tightfit.planning.estimate import Margin, predict_memory
    from tightfit.planning.standard_tools import standard_tools

    device = replace(device, host_bytes=memory.total)
    tools = replace(standard_tools(backend), margin=Margin(host=0))

    def memory_of(recipe: Recipe) -> Memory:
        return predict_memory(backend.predict(recipe, device), recipe, device, tools)

    found = memory_of(recipe)
    needed, missing = found.host, found.host_missing
    if not missing:
        if needed > memory.available:
            log(f"warning: {size(needed)} of host memory are predicted to be needed for what is offloaded and for "
                f"loading, and {size(memory.available)} are free: the system may end the run. End what else runs")
        return
    fitting: list[str] = []
    for text, changed in _changes(recipe, device, found):
        if len(fitting) < MOST_NAMED and not changed.refusals(device):
            fitting += [text] if memory_of(changed).fit_rank.fits else []
    advice = f"Write {'; or '.join(fitting)}" if fitting else (
        "Nothing that keeps more on this GPU fits it: write a smaller model, or train where there are "
        f"{size(needed)} of memory")
    raise Refused(f"{found.notes[0]}. {advice}")


def _changes(recipe: Recipe, device: Device, memory: Memory) -> Iterator[tuple[str, Recipe]]:
    """Recipes that may keep less in the host's memory, each with the words to write. memory: the recipe's own."""
    from tightfit.planning.host_shares import KINDS, fill_device
    from tightfit.planning.suggestions import savings

    assert recipe.offload != "auto"
    if not memory.host_too_small:
        yield "offload.activations=0 (the rest stays on the GPU)", recipe.override(
            offload=recipe.offload.with_shares({"activations": 0}))
    for saving in [saving for saving in savings(recipe, device) if saving.field == "optimizer"][:MOST_NAMED]:
        yield str(saving), recipe.override(**{saving.field: saving.value})
    if (filled := fill_device(recipe.offload, memory)) is not None:
        shares = [f"offload.{kind}={getattr(filled.shares, kind):g}" for kind in KINDS
                  if getattr(filled.shares, kind) < getattr(recipe.offload.shares, kind)]
        yield f"{' '.join(shares)} (the rest stays on the GPU)", recipe.override(offload=filled)


def rough_bytes(recipe: Recipe, backend: Backend, config: Any = None) -> float:
    """A bound on what a step takes, as if every value that a forward pass makes were kept with its gradient, in fp32,
    attention's scores written out; infinite where that is not known. Raises ModelError for a model that cannot be
    built."""
    assert recipe.optimizer != "auto"
    found = backend.model_size(recipe, config)
    states = found.parameters * (8 + recipe.optimizer.bytes_beside(None))
    return states + 8.0 * recipe.resolved_micro_batch * found.values if found.values else math.inf
