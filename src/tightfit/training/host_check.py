"""Check of the host's memory for a run on a GPU whose blocks wait there, before it begins.

It is page-locked, so that the system can move none of it to disk: it ends the run instead, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from tightfit.backends.base import Backend
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.text import size
from tightfit.training.memory_check import rough_bytes

NAMED = 2
"""Changes that are named at once, each of which fits."""
SHARES = (0.75, 0.5, 0.25)
"""Shares of the blocks in host memory that are tried where all do not fit."""


def check_host_memory(
    recipe: Recipe, device: Device, backend: Backend, config: Any, log: Callable[[str], None]
) -> None:
    """Say where a resolved recipe's step is predicted to keep more in the host's memory than is free there.

    config: of the recipe's model. What fits by a rough bound is not predicted. Raises Refused where it is more than the
    machine has, or than its control group or the limits on this process leave of it.
    """
    memory = host_memory()
    try:
        whole = recipe.override(micro_batch_size=recipe.batch_size)  # what all micro-batches keep waits at once
        if rough_bytes(whole, backend, config) < memory.available:
            return
        _weigh(recipe, replace(device, host_bytes=memory.total), backend, memory.available, log)
    except ModelError:
        return


def _weigh(recipe: Recipe, device: Device, backend: Backend, free: int, log: Callable[[str], None]) -> None:
    from tightfit.planning.estimate import Fit, Margin, fit
    from tightfit.planning.standard_tools import standard_tools
    from tightfit.trace import Place, Trace

    def fit_of(trace: Trace) -> Fit:
        return fit(trace, device, standard_tools(backend), Margin(host=0))

    trace = backend.predict(recipe, device)
    found = fit_of(trace)
    needed, missing = found.memory.host, found.memory.host_missing
    if not missing:
        if needed > free:
            log(f"warning: {size(needed)} of host memory are predicted to be needed for what is offloaded and for "
                f"loading, and {size(free)} are free: the system may end the run. End what else runs")
        return
    tick, _ = trace.peak(place=Place.HOST)
    held = {category.value: count for category, count in trace.by_category(tick, Place.HOST).items()}
    fitting: list[str] = []
    for text, changed in _changes(recipe, device, held, missing):
        if len(fitting) < NAMED and not changed.refusals(device):
            fitting += [text] if fit_of(backend.predict(changed, device)).fits != "no" else []
    advice = f"Write {'; or '.join(fitting)}" if fitting else (
        "Nothing that keeps more on this GPU fits it: write a smaller model, or train where there are "
        f"{size(needed)} of memory")
    raise Refused(f"{found.notes[0]}. {advice}")


def _changes(recipe: Recipe, device: Device, held: dict[str, int], missing: int) -> Iterator[tuple[str, Recipe]]:
    """Recipes that may keep less in the host's memory, each with the words to write. held: bytes that wait there now,
    by what they are."""
    from tightfit.planning.suggestions import savings

    def with_shares(**shares: float) -> tuple[str, Recipe]:
        text = " ".join(f"offload.{kind}={share:g}" for kind, share in shares.items())
        kept = replace(cast(Any, recipe.offload), **shares)
        return f"{text} (the rest stays on the GPU)", recipe.override(offload=kept)

    kinds = ("weights", "gradients", "optimizer")
    if held["activations"] >= missing:
        yield with_shares(activations=0)
    for saving in [saving for saving in savings(recipe, device) if saving.field == "optimizer"][:NAMED]:
        yield str(saving), recipe.override(**{saving.field: saving.value})
    shares = [share for share in SHARES if (1 - share) * sum(held[kind] for kind in kinds) >= missing]
    if shares:
        yield with_shares(**{kind: min(shares[0], getattr(recipe.offload, kind)) for kind in kinds})
