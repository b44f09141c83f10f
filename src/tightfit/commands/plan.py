"""`tightfit plan`: the words of a command line to a plan on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from tightfit.display.gpu_tables import show_comparison, show_overview
from tightfit.display.plan_table import ReadablePlan, show_plan
from tightfit.display.progress import SearchProgress
from tightfit.errors import RecipeError, Refused, ReportError
from tightfit.planner import RecipeForDevice, asks_for_overview, compare, overview, plan_on
from tightfit.planning.cluster import Cluster, read_cluster
from tightfit.planning.saved_plans import is_kept, question_of, remembered, this_machine
from tightfit.planning.search.every_gpu import Comparison, parse_prices
from tightfit.planning.search.extremes import models_like
from tightfit.planning.search.overview import Overview
from tightfit.planning.whole_run import parse_price, parse_tokens
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import load_recipe, name_and_overrides

EVERY_GPU = "all"


def run_plan(
    name: str | None, words: Sequence[str] = (), *, gpus: Sequence[str] = (), gpu_memory: str | None = None,
    host_memory: str | None = None, count: int | None = None, nodes: int | None = None, network: str | None = None,
    as_json: bool = False, prices: Sequence[str] = (), tokens: str | None = None,
    training_arguments: Path | None = None, longest: str | None = None, largest: str | None = None,
    html: Path | None = None, top: int | None = None, use_cache: bool = True,
) -> None:  # fmt: skip
    """Print a plan, or a comparison of all GPUs; a progress bar goes to standard error.

    name: the recipe; it may be an override where training arguments are given. count, nodes, network: as `gpus`,
    `nodes` and `network` of `planner.plan`. tokens: of a whole run, such as `1B`. top: candidates, or GPUs, to show.
    use_cache: whether an earlier answer to the same question serves.
    longest, largest: what is to be as large as fits, `seq_len`, and `micro_batch_size` or `model=PATTERN`.
    html: where the plan is drawn as a page.
    Raises TightfitError for bad input, and Refused after printing where nothing fits.
    """
    if top is not None and top < 1:
        raise RecipeError(f"top: {top} should be 1 or more, such as --top 3")
    if len(gpus) > 1 or any("," in each for each in gpus):
        raise RecipeError(f"gpu: {', '.join(gpus)} are several; write one GPU, or --gpu all to compare all of them")
    if longest and largest:
        raise RecipeError(f"largest: {largest!r} and --longest {longest} are two questions; write one of them")
    extreme = longest or largest or ""
    gpu, cluster = read_cluster(next(iter(gpus), None), count, nodes, network)
    overrides = list(words)
    if extreme.startswith("model=") and (name is None or "=" in name):
        overrides = [*([name] if name else []), *overrides]
        name = models_like(extreme.partition("=")[2])[0]
    if name is not None and training_arguments is not None and "=" in name:
        overrides.insert(0, name)
        name = None
    elif name is not None:
        name, overrides = name_and_overrides([name, *overrides])

    def recipe_on(cuda: bool) -> Recipe:
        return load_recipe(name, overrides, cuda=cuda, training_arguments=training_arguments)

    machine = this_machine() if use_cache else ""

    def asked(**more: object) -> str | None:
        options = {"gpu": gpu, "gpu_memory": gpu_memory, "host_memory": host_memory, "cluster": cluster,
                   "largest": extreme, **more}
        return question_of(name, overrides, options, training_arguments, machine) if use_cache else None

    count_of_tokens = 0 if tokens is None else parse_tokens(tokens)
    if gpu == EVERY_GPU and html is not None:
        raise RecipeError(f"html: {html} is the page of one GPU's plan; write --gpu with its name")
    if gpu == EVERY_GPU and extreme:
        raise RecipeError(f"largest: {extreme!r} is asked of one GPU; write --gpu with its name")
    if gpu == EVERY_GPU and host_memory is not None:
        raise RecipeError(f"host-memory: {host_memory!r} is for one GPU, and --gpu all compares many; leave it out")
    if gpu == EVERY_GPU:
        by_name = parse_prices(prices)
        _compare(recipe_on, gpu_memory, by_name, count_of_tokens, as_json, top, partial(asked, prices=by_name))
        return
    about_all = partial(asked, ways=True)
    named = (html, extreme, gpu, gpu_memory, host_memory, prices, tokens, training_arguments)
    if not any(named) and cluster == Cluster() and (is_kept(about_all()) or asks_for_overview(recipe_on(False))):
        _overview(recipe_on, as_json, top, about_all)
        return
    if prices and not count_of_tokens:
        raise RecipeError(f"price: {prices[0]!r} is for comparing GPUs, and for the cost of a run; write --gpu all or "
                          "--tokens 1B with it")
    price = parse_price(prices[0].rpartition("=")[2]) if prices else None
    _plan(partial(plan_on, recipe_on, gpu, gpu_memory, host_memory, cluster=cluster, largest=extreme), count_of_tokens,
          price, as_json, top, html, asked)


def _plan(
    planned: Callable[..., ReadablePlan], tokens: int, price: float | None, as_json: bool, top: int | None,
    html: Path | None, asked: Callable[[], str | None],
) -> None:  # fmt: skip
    # A model's own code may print; what is printed here is the plan alone.
    with SearchProgress(Console(stderr=True), "planning", "traces") as progress, redirect_stdout(sys.stderr):
        plan, cached = remembered(ReadablePlan, asked, partial(planned, progress=progress))
    gpus = max(plan.device.world, 1)
    plan = replace(plan, candidates=plan.candidates[:top], tokens=tokens, cached=cached,
                   price=None if price is None else price * gpus)
    if as_json:
        _print_json(plan.to_json())
    else:
        show_plan(plan, Console())
    if html is not None:
        _draw(plan, html)
    if plan.chosen is None:
        shown = f"nothing fits on {plan.device.name}; what would help is said above"
        raise Refused(plan.nothing_fits() if as_json else shown)


def _draw(plan: ReadablePlan, path: Path) -> None:
    from tightfit.display.plan_page import write_plan_page

    try:
        write_plan_page(path, plan)
    except OSError as error:
        raise ReportError(f"html: {path} cannot be written ({error.strerror or error}); write another file") from None
    Console(stderr=True, soft_wrap=True).print(f"page: {path}", markup=False, highlight=False)


def _compare(
    recipe_on: RecipeForDevice, gpu_memory: str | None, prices: Mapping[str, float], tokens: int, as_json: bool,
    top: int | None, asked: Callable[[], str | None],
) -> None:  # fmt: skip
    if gpu_memory is not None:
        raise RecipeError(f"gpu-memory: {gpu_memory!r} is for one GPU, and --gpu all compares many; leave it out")
    with SearchProgress(Console(stderr=True), "planning", "GPUs") as progress:
        comparison, cached = remembered(Comparison, asked, partial(compare, recipe_on, prices, progress=progress))
    fitting = any(row.chosen is not None for row in comparison.rows)
    comparison = replace(comparison, rows=comparison.rows[:top], tokens=tokens, cached=cached)
    if as_json:
        _print_json(comparison.to_json())
    else:
        show_comparison(comparison, Console())
    if not fitting:
        raise Refused("nothing fits on any GPU of the catalogue; tightfit plan with --gpu and one name says what would "
                      "help")


def _overview(recipe_on: RecipeForDevice, as_json: bool, top: int | None, asked: Callable[[], str | None]) -> None:
    with SearchProgress(Console(stderr=True), "planning", "traces") as progress, redirect_stdout(sys.stderr):
        found, cached = remembered(Overview, asked, partial(overview, recipe_on, progress=progress))
    shown = replace(found, cards=found.cards[:top], cached=cached)
    if as_json:
        _print_json(shown.to_json())
    else:
        show_overview(shown, Console())
    if not found.fitting:
        raise Refused("nothing fits on any GPU of the catalogue; tightfit plan with --gpu and one name says what would "
                      "help")


def _print_json(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2, allow_nan=False) + "\n")
