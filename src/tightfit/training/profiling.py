"""Profiling a recipe: a few real steps on its own data, measured; nothing is kept of what they learn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.backends import load_backend
from tightfit.backends.base import Backend, Measurement
from tightfit.data import prepare
from tightfit.data.loading import WindowLoader
from tightfit.devices import Device
from tightfit.errors import OutOfMemory, RecipeError
from tightfit.models import model_facts, module_facts
from tightfit.planning.advice import smaller
from tightfit.planning.plan import Plan
from tightfit.planning.search.settling import settle
from tightfit.recipe import Recipe
from tightfit.training.progress import Listener, Quiet

WINDOWS = 16
"""More windows than a measurement takes."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A recipe's steps, measured. recipe: resolved. plan: what `auto` was settled by; None where nothing was planned.
    notes: what the build had to say."""

    recipe: Recipe
    device: Device
    backend: Backend
    measurement: Measurement
    plan: Plan | None
    notes: tuple[str, ...]


def profile_recipe(
    recipe: Recipe, module: Any = None, dataset: Any = None, *, listener: Listener | None = None,
    chrome_trace: Path | None = None, around: Callable[[Device], AbstractContextManager[Any]] = nullcontext,
) -> Profiled:  # fmt: skip
    """Build what training by the recipe would build, and measure a few of its steps on its own data.

    module, dataset: as `Trainer` takes them. chrome_trace: where the profiler's own trace goes, for Perfetto; gzipped
    where its name ends in `.gz`. around: entered while steps run, such as to watch the card.
    Raises the errors of `tightfit.errors`, as training does.
    """
    if recipe.mode != "train":
        raise RecipeError("mode: 'inference' is for planning, and a profile is of training; write mode=train")
    listener = listener or Quiet()
    backend = load_backend(recipe.backend)
    device = backend.device(recipe)
    recipe, plan = settle(recipe, device, lambda r, d: backend.predict(r, d, module), listener.message)
    facts = model_facts(recipe) if module is None else module_facts(module, recipe)
    data = prepare(recipe, facts, progress=listener.preparing, dataset=dataset)
    build = backend.build(recipe, device, module)
    step = backend.step(build)
    windows = step.windows(WindowLoader(data.train, recipe), 0, WINDOWS)
    listener.message("measuring: a few steps as they are, then one with every op followed")
    try:
        with around(device):
            measurement = backend.measure(step, windows, chrome_trace)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}. Try: {'; or '.join(smaller(recipe, device))}") from None
    return Profiled(recipe=recipe, device=device, backend=backend, measurement=measurement, plan=plan,
                    notes=tuple(build.notes))
