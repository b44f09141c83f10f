"""`tightfit plan`: the words of a command line to a plan on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tightfit.display.gpu_tables import show_comparison
from tightfit.display.plan_table import show_plan
from tightfit.display.progress import SearchProgress
from tightfit.errors import RecipeError, Refused
from tightfit.planner import RecipeForDevice, compare, plan_on
from tightfit.planning.search.every_gpu import parse_prices
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import load_recipe, name_and_overrides

EVERY_GPU = "all"


def run_plan(
    name: str | None, words: Sequence[str] = (), *, gpus: Sequence[str] = (), gpu_memory: str | None = None,
    host_memory: str | None = None, as_json: bool = False, prices: Sequence[str] = (),
    training_arguments: Path | None = None, top: int | None = None,
) -> None:  # fmt: skip
    """Print a plan, or a comparison of all GPUs; a progress bar goes to standard error.

    name: the recipe; it may be an override where training arguments are given. top: candidates, or GPUs, to show.
    Raises TightfitError for bad input, and Refused after printing where nothing fits.
    """
    if top is not None and top < 1:
        raise RecipeError(f"top: {top} should be 1 or more, such as --top 3")
    if len(gpus) > 1 or any("," in each for each in gpus):
        raise RecipeError(f"gpu: {', '.join(gpus)} are several; write one GPU, or --gpu all to compare all of them")
    gpu = next(iter(gpus), None)
    overrides = list(words)
    if name is not None and training_arguments is not None and "=" in name:
        overrides.insert(0, name)
        name = None
    elif name is not None:
        name, overrides = name_and_overrides([name, *overrides])

    def recipe_on(cuda: bool) -> Recipe:
        return load_recipe(name, overrides, cuda=cuda, training_arguments=training_arguments)

    by_name = parse_prices(prices)
    if gpu == EVERY_GPU and host_memory is not None:
        raise RecipeError(f"host-memory: {host_memory!r} is for one GPU, and --gpu all compares many; leave it out")
    if gpu == EVERY_GPU:
        _compare(recipe_on, gpu_memory, by_name, as_json, top)
    elif prices:
        raise RecipeError(f"price: {prices[0]!r} is for comparing GPUs; write --gpu all with it")
    else:
        _plan(recipe_on, gpu, gpu_memory, host_memory, as_json, top)


def _plan(
    recipe_on: RecipeForDevice, gpu: str | None, gpu_memory: str | None, host_memory: str | None, as_json: bool,
    top: int | None,
) -> None:  # fmt: skip
    # A model's own code may print; what is printed here is the plan alone.
    with SearchProgress(Console(stderr=True), "planning", "traces") as progress, redirect_stdout(sys.stderr):
        plan = plan_on(recipe_on, gpu, gpu_memory, host_memory, progress=progress)
    plan = replace(plan, candidates=plan.candidates[:top])
    if as_json:
        _print_json(plan.to_json())
    else:
        show_plan(plan, Console())
    if plan.chosen is None:
        shown = f"nothing fits on {plan.device.name}; what would help is said above"
        raise Refused(plan.nothing_fits() if as_json else shown)


def _compare(
    recipe_on: RecipeForDevice, gpu_memory: str | None, prices: Mapping[str, float], as_json: bool, top: int | None
) -> None:
    if gpu_memory is not None:
        raise RecipeError(f"gpu-memory: {gpu_memory!r} is for one GPU, and --gpu all compares many; leave it out")
    with SearchProgress(Console(stderr=True), "planning", "GPUs") as progress:
        comparison = compare(recipe_on, prices, progress=progress)
    fitting = any(row.chosen is not None for row in comparison.rows)
    comparison = replace(comparison, rows=comparison.rows[:top])
    if as_json:
        _print_json(comparison.to_json())
    else:
        show_comparison(comparison, Console())
    if not fitting:
        raise Refused("nothing fits on any GPU of the catalogue; tightfit plan with --gpu and one name says what would "
                      "help")


def _print_json(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2, allow_nan=False) + "\n")
