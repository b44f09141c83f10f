"""`tightfit plan`: the words of a command line to a plan on standard output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from tightfit.devices import Device, find_device, says_memory
from tightfit.display.gpu_tables import show_comparison, show_overview
from tightfit.display.plan_table import ReadablePlan, show_plan
from tightfit.display.progress import SearchProgress
from tightfit.errors import RecipeError, Refused, ReportError, writing
from tightfit.files import write_atomically
from tightfit.planner import RecipeForDevice, asks_for_overview, compare_gpus, overview, plan_on
from tightfit.planning.cluster import Cluster, read_cluster
from tightfit.planning.plan import Interrupted
from tightfit.planning.search.every_gpu import Comparison, parse_prices
from tightfit.planning.search.extremes import models_like
from tightfit.planning.search.overview import Overview
from tightfit.planning.whole_run import parse_price, parse_tokens, steps_of
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import load_recipe, name_and_overrides
from tightfit.recipe.yaml_text import to_yaml

EVERY_GPU = "all"
Answer = TypeVar("Answer", ReadablePlan, Comparison, Overview)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the command line, as written.

    count, nodes, network: as `gpus`, `nodes` and `network` of `planner.plan`. tokens: of a whole run, such as `1B`.
    longest, largest: what is to be as large as fits, `seq_len`, and `micro_batch_size` or `model=PATTERN`.
    html: where the plan is drawn as a page. save: where the chosen recipe is written, as YAML. top: candidates, or
    GPUs, to show. verbose: whether one GPU's plan is shown with all that is known of it.
    """

    gpus: Sequence[str]
    gpu_memory: str | None
    host_memory: str | None
    count: str | None
    nodes: str | None
    network: str | None
    as_json: bool
    prices: Sequence[str]
    tokens: str | None
    training_arguments: Path | None
    longest: str | None
    largest: str | None
    html: Path | None
    save: Path | None
    top: str | None
    verbose: bool

    @property
    def extreme(self) -> str:
        """The field that is to be as large as fits; empty where none is."""
        return self.longest or self.largest or ""

    @property
    def files(self) -> dict[str, Path]:
        """The files of one GPU's plan, by their options."""
        return {name: path for name, path in (("html", self.html), ("save", self.save)) if path is not None}

    @property
    def best(self) -> int | None:
        """Candidates, or GPUs, to show; None for all."""
        return whole("top", self.top)

    def check(self) -> None:
        """Raise TightfitError for what contradicts itself, and for files that cannot be written."""
        if self.best is not None and self.best < 1:
            raise RecipeError(f"top: {self.top} should be 1 or more, such as --top 3")
        if "" in (self.longest, self.largest):
            raise RecipeError("longest, largest: '' names no field; write --longest seq_len, or --largest "
                              "micro_batch_size")
        if self.longest and self.largest:
            raise RecipeError(f"largest: {self.largest!r} and --longest {self.longest} are two questions; write one of "
                              "them")
        for option, path in self.files.items():
            with writing(f"{option}: {path}", "write another file"):
                possible = path.parent.is_dir() and not path.is_dir()
            if not possible:
                raise ReportError(f"{option}: {path} cannot be written; write a file in a folder that is there")
        if self.html is not None and self.html == self.save:
            raise ReportError(f"save: {self.save} is the page of --html as well; write another file")

    def check_for_several(self) -> None:
        """Raise RecipeError for what is asked of one GPU alone."""
        for option, path in self.files.items():
            raise RecipeError(f"{option}: {path} is for one GPU's plan; write --gpu with its name")
        if self.extreme:
            option = "longest" if self.longest else "largest"
            raise RecipeError(f"{option}: {self.extreme!r} is asked of one GPU; write --gpu with its name")
        if self.gpu_memory is not None:
            raise RecipeError(f"gpu-memory: {self.gpu_memory!r} is for one GPU, and several are compared; leave it out")


def whole(option: str, given: str | None) -> int | None:
    """The whole number that an option is given, if any. Raises RecipeError; Typer's own does not say what was given."""
    if given is None:
        return None
    if re.fullmatch(r"\s*-?\d{1,9}\s*", given):
        return int(given)
    raise RecipeError(f"{option}: {given!r} should be a whole number, such as --{option} 2")


def run_plan(name: str | None, words: Sequence[str], options: PlanOptions) -> None:
    """Print a plan, or a comparison of GPUs; a progress bar goes to standard error.

    name: the recipe; it may be an override where training arguments are given. Raises TightfitError for bad input, and
    Refused after printing where nothing fits.
    """
    options.check()
    gpu, cluster = read_cluster(",".join(options.gpus) if options.gpus else None, whole("gpus", options.count),
                                whole("nodes", options.nodes), options.network)
    # Before anything that takes seconds.
    named = [] if gpu in (None, "cpu", EVERY_GPU) or says_memory(gpu) else _cards(gpu.split(","))
    several = {device.name: device for device in named} if len(named) > 1 else {}
    arguments, extreme, overrides = options.training_arguments, options.extreme, list(words)
    if extreme.startswith("model=") and (name is None or "=" in name):
        overrides = [*([name] if name else []), *overrides]
        name = models_like(extreme.partition("=")[2])[0]
    if name is not None:
        name, overrides = name_and_overrides([name, *overrides])

    def recipe_on(cuda: bool) -> Recipe:
        return load_recipe(name, overrides, cuda=cuda, training_arguments=arguments)

    if gpu == EVERY_GPU or several:
        options.check_for_several()
        _compare(recipe_on, several, options)
    elif not _show_overview(recipe_on, options, alone=gpu is None and cluster == Cluster()):
        planned = partial(plan_on, recipe_on, gpu, options.gpu_memory, options.host_memory, cluster=cluster,
                          largest=extreme)
        _plan(recipe_on, planned, options, gpu)


def _cards(names: Sequence[str]) -> list[Device]:
    """A GPU, or those that are compared. Raises RecipeError."""
    for name in names if len(names) > 1 else ():
        if name.strip() in ("", "cpu", EVERY_GPU) or says_memory(name) or re.match(r"\s*\d+\s*x", name):
            raise RecipeError(f"gpu: {name!r} cannot be one of several: single GPUs are compared by their names, such "
                              "as --gpu l4,rtx-4090; leave it out")
    return list(map(find_device, names))


def _compare(recipe_on: RecipeForDevice, devices: Mapping[str, Device], options: PlanOptions) -> None:
    """Print a comparison. devices: by their names; all of the catalogue where there are none."""
    tokens, prices = _tokens(options, recipe_on(True)), parse_prices(options.prices)
    if devices and (others := prices.keys() - devices.keys()):
        raise RecipeError(f"price: {', '.join(sorted(others))} not among the GPUs compared; name it in --gpu too, "
                          "or leave its price out")
    compared = partial(compare_gpus, recipe_on, list(devices.values()), options.host_memory)
    found, interrupted = _planned(compared, "GPUs")
    found = found.priced(prices)
    shown = replace(found, rows=found.rows[: options.best], tokens=tokens)
    fitting = interrupted or any(row.chosen is not None for row in found.rows)
    _show_all(shown, show_comparison, options.as_json, bool(fitting))
    _end(interrupted)


def _show_overview(recipe_on: RecipeForDevice, options: PlanOptions, *, alone: bool) -> bool:
    """Print what fits every GPU where nothing but a model is asked about, and this machine has none; whether it was.
    alone: whether no GPU is named."""
    given = (options.gpu_memory, options.host_memory, options.tokens, options.training_arguments)
    named = (options.files, options.extreme, options.prices, any(option is not None for option in given))
    if any(named) or not alone or not asks_for_overview(recipe_on(False)):
        return False
    found, _ = _planned(partial(overview, recipe_on), "traces")
    _show_all(replace(found, cards=found.cards[: options.best]), show_overview, options.as_json, found.fitting)
    return True


def _plan(
    recipe_on: RecipeForDevice, planned: Callable[..., ReadablePlan], options: PlanOptions, gpu: str | None
) -> None:
    prices = options.prices
    if len(prices) > 1:
        raise RecipeError(f"price: {', '.join(prices)} are several, and this is one GPU's plan; write one, or "
                          "--gpu all or several as --gpu l4,rtx-4090 to compare GPUs")
    recipe = recipe_on(gpu != "cpu")
    tokens = _tokens(options, recipe)
    if prices and not (tokens or steps_of(recipe)):
        raise RecipeError(f"price: {prices[0]!r} is for comparing GPUs, and for the cost of a run; write --gpu all, "
                          "several as --gpu l4,rtx-4090, or --tokens 1B or max_steps=2000 with it")
    of_gpus = parse_prices(prices) if prices and "=" in prices[0] else {}
    alone = None
    if prices and not of_gpus:
        alone = parse_price(prices[0], f"price: {prices[0]!r} should be what the GPU costs an hour, such as "
                            "--price 2.50")

    def price_of(name: str) -> float | None:
        if of_gpus and name not in of_gpus:
            raise RecipeError(f"price: {prices[0]!r} is not the price of {name}; write its price alone")
        return of_gpus.get(name, alone)

    if of_gpus and gpu not in (None, "cpu"):  # before anything that takes seconds
        price_of(find_device(gpu).name)
    plan, interrupted = _planned(planned, "traces")
    price = price_of(plan.device.name)
    plan = replace(plan, candidates=plan.candidates[: options.best], tokens=tokens,
                   price=None if price is None else price * max(plan.device.world, 1))
    if options.as_json:
        _print_json(plan.to_json())
    else:
        show_plan(plan, Console(), verbose=options.verbose)
    if options.html is not None:
        from tightfit.display.plan_page import plan_page

        _write("html", options.html, "page", plan_page(plan))
    _end(interrupted)
    if plan.chosen is None:
        shown = f"nothing fits on {plan.device.name}; what would help is said above"
        raise Refused(plan.nothing_fits() if options.as_json else shown)
    if options.save is not None:
        device = {"device": "cpu"} if plan.device.kind == "cpu" else {}  # elsewhere it would be another plan
        _write("save", options.save, "recipe", to_yaml(plan.recipe.to_dict() | device))


def _tokens(options: PlanOptions, recipe: Recipe) -> int:
    """Tokens of a whole run: from --tokens, or of `num_train_epochs` over data on this machine; 0 if neither is known.
    """
    if options.tokens is not None or recipe.num_train_epochs is None:
        return 0 if options.tokens is None else parse_tokens(options.tokens)
    from tightfit.training.listeners import Terminal
    from tightfit.training.session import tokens_of_epochs  # for these alone

    with Terminal(Console(stderr=True, soft_wrap=True)) as terminal:
        return tokens_of_epochs(recipe, terminal.message, terminal.preparing)


def _write(option: str, path: Path, what: str, text: str) -> None:
    with writing(f"{option}: {path}", "write another file"):
        write_atomically(path, text)
    Console(stderr=True, soft_wrap=True).print(f"{what}: {path}", markup=False, highlight=False)


def _planned(planned: Callable[..., Answer], unit: str) -> tuple[Answer, str]:
    """The answer, and how far planning was when Ctrl-C ended it, empty where nothing did. unit: of progress, such as
    traces."""
    # A model's own code may print; what is printed here is the plan alone.
    with SearchProgress(Console(stderr=True), "planning", unit) as progress, redirect_stdout(sys.stderr):
        try:
            return planned(progress=progress), ""
        except Interrupted as interrupted:  # what took minutes is shown all the same
            return interrupted.found, interrupted.said


def _end(interrupted: str) -> None:
    """Raise KeyboardInterrupt after saying how far planning was, where that is not empty."""
    if interrupted:
        Console(stderr=True, soft_wrap=True).print(interrupted, markup=False, highlight=False)
        raise KeyboardInterrupt


def _show_all(answer: Answer, show: Callable[[Answer, Console], None], as_json: bool, fitting: bool) -> None:
    """Print what was planned for several GPUs. Raises Refused where nothing fits on any."""
    if as_json:
        _print_json(answer.to_json())
    else:
        show(answer, Console())
    if not fitting:
        raise Refused("nothing fits on any of these GPUs; tightfit plan with --gpu and one name says what would help")


def _print_json(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2, allow_nan=False) + "\n")
