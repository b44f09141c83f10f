"""Planning with a backend: which device, which recipe; the search itself is in `tightfit.planning`.

    plan = tightfit.plan("gpt2", {"seq_len": 1024}, gpu="rtx-4090")
    print(plan)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tightfit.backends import backend_of, load_backend
from tightfit.devices import Device, catalogue, parse_host_memory
from tightfit.display.plan_table import ReadablePlan
from tightfit.display.progress import SearchProgress
from tightfit.errors import RecipeError
from tightfit.models import read_config
from tightfit.planning.cluster import Cluster, on_cluster, read_cluster
from tightfit.planning.drives import moves_of
from tightfit.planning.estimate import without_times
from tightfit.planning.plan import Plan
from tightfit.planning.search.evaluate import InProcess, Progress, after
from tightfit.planning.search.every_gpu import Comparison
from tightfit.planning.search.every_gpu import compare as compare_devices
from tightfit.planning.search.extremes import candidates, find_largest
from tightfit.planning.search.overview import Overview
from tightfit.planning.search.overview import overview as over_all
from tightfit.planning.search.pool import Pool
from tightfit.planning.search.search import search_with
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target, gpu_target, own_target
from tightfit.recipe import Data, Recipe
from tightfit.recipe.lookup import as_recipe
from tightfit.text import seconds, size

RecipeForDevice = Callable[[bool], Recipe]
"""The recipe as it is on a CUDA device, or on the CPU: a recipe file may differ between the two."""


def plan(
    model: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    gpu: str | None = None,
    *,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    network: str | None = None,
    progress: bool | Progress = False,
) -> ReadablePlan:
    """Predict what each combination of techniques costs on a GPU, which need not be in this machine, and choose one.

    model: a bundled name, Hugging Face id or folder (replacing the recipe's), or a torch module of your own, whose
        weights are not read; None takes the recipe's. A module is planned for rows of your own, which are not packed,
        where the recipe names no data.
    recipe: a Recipe, a mapping of its fields, or the name or path of a recipe file. What it pins is kept.
    gpu: a name such as `rtx-4090`, or `cpu` for this machine's processor; by default its own CUDA device.
    gpu_memory: a size such as `24GB`, of a card that has no name here, or instead of the named one's.
    host_memory: a size such as `64GB`, of the machine around the GPU, for what waits there; by default this machine's
        where the GPU is its own, else assumed: twice the GPU's, 32 GiB at least, and more where nothing fits so.
    gpus: how many such GPUs a machine has; `8xh100-sxm` as `gpu` says the same. nodes: how many machines. network: what
        each of these sends in a second, such as `100Gbit`, or `8x400Gbit` with a network card for each of 8 GPUs.
    progress: show how far it is on standard error, as the command line does; by default nothing is shown. Or called
        before each trace with how many are done, None, and what comes next; at the end with their number twice and
        `done`.

    The plan shows as a table where it is printed and in a notebook; `plan.recipe` is the choice. Raises the errors of
    `tightfit.errors`: for an unknown GPU, contradictory pins, and a model that cannot be traced. Where nothing fits
    there is a plan all the same, which says so and what would help.

    >>> print(tightfit.plan("gpt2", {"seq_len": 512}, gpu="rtx-4090"))  # doctest: +SKIP
    """
    module = None if model is None or isinstance(model, str) else model
    gpu, cluster = read_cluster(gpu, gpus, nodes, network)
    bar = SearchProgress(Console(stderr=True), "planning", "traces") if progress is True else nullcontext(progress)
    with bar as tell:
        return plan_on(lambda cuda: as_recipe(recipe, model, cuda=cuda), gpu, gpu_memory, host_memory, cluster=cluster,
                       module=module, progress=tell or None)


def plan_on(
    recipe_on: RecipeForDevice, gpu: str | None, gpu_memory: str | None = None, host_memory: str | None = None, *,
    cluster: Cluster | None = None, module: Any = None, progress: Progress | None = None, largest: str = "",
) -> ReadablePlan:  # fmt: skip
    """As `plan`, of a recipe that may differ between devices. cluster: of such GPUs; None for one. largest: what is to
    be as large as fits one of them, see `extremes.candidates`."""
    target = target_for(recipe_on(gpu not in (None, "cpu") or gpu_memory is not None), gpu, gpu_memory)
    if host_memory is not None:
        if target.device.kind == "cpu":
            raise RecipeError(f"host-memory: {host_memory!r} is beside a GPU's, and this plan is for the processor")
        target = replace(target, device=replace(target.device, host_bytes=parse_host_memory(host_memory)))
    cuda = target.device.kind == "cuda"
    recipe, cluster = on_cluster(recipe_on(cuda), cluster or Cluster())
    target = replace(target, device=cluster.on(target.device))
    aside = [f"use_cpu: left aside for {target.device.name}"] if cuda and recipe_on(False).device == "cpu" else []
    if module is None:
        read_config(recipe)  # which tells at once what no combination of techniques would mend
    elif recipe.data == Data():
        recipe = recipe.model_copy(update={"data": Data(packing=False)})  # rows of one's own are never packed
    backend, most = backend_of(recipe), None
    if largest:
        if target.device.world > 1 or not recipe.backend.runs_torch:
            raise RecipeError(f"longest, largest: {largest} is asked of one device, with backend: pytorch")
        tools = standard_tools(backend, target.calibration, module)
        recipe, most = find_largest(largest, candidates(recipe, largest, backend.model_size), target.device,
                                    InProcess(without_times(tools)), progress)
    progress = after(most.traces, progress) if most is not None else progress
    found = search_with(backend, recipe, target, module=module, progress=progress,
                        catalogue=[cluster.on(card) for card in catalogue()] if cuda else ())
    answers = replace(found.answers, unread=(*found.answers.unread, *aside))
    return ReadablePlan.of(replace(found, answers=answers, largest=most, notes=(*found.notes, *_drive_notes(found))))


def _drive_notes(found: Plan) -> list[str]:
    """A sentence on what a plan's choice moves to and from a drive, at the speed measured of it where it is here."""
    if found.chosen is None or (drive := found.chosen.recipe.parallel.nvme_path) is None:
        return []
    moves = moves_of(found.chosen.recipe, found.chosen.estimate.memory.drive * found.device.cards)
    said = (f"parallel.offload: a step reads {size(moves.read)} of each machine's drive and writes "
            f"{size(moves.written)}")
    if not Path(drive).is_dir():
        return [f"{said}; {drive} is not here: tightfit doctor measures the drive where it is run"]
    from tightfit.doctor.machine import read_disk  # for drives alone

    disk = read_disk(Path(drive))
    if disk.write is None or disk.read is None:
        return [f"{said}; the drive at {drive} could not be measured ({disk.error or 'no reading speed'})"]
    wait = moves.read / disk.read + moves.written / disk.write
    return [f"{said}: {seconds(wait)} at the {disk.read / 1e6:,.0f} and {disk.write / 1e6:,.0f} MB/s measured at "
            f"{drive}, of a step that takes {seconds(found.chosen.estimate.time.step_seconds)} besides"]


def compare_gpus(
    recipe_on: RecipeForDevice, devices: Sequence[Device] = (), host_memory: str | None = None, *,
    progress: Progress | None = None,
) -> Comparison:  # fmt: skip
    """The recipe planned for each of the devices, or every GPU of the catalogue where none are given. host_memory: as
    of `plan`, of the machine around any of them."""
    recipe = recipe_on(True)
    _check_device(recipe, ", ".join(device.name for device in devices) or "all", "cuda")
    devices = devices or catalogue()
    if host_memory is not None:
        devices = [replace(device, host_bytes=parse_host_memory(host_memory)) for device in devices]
    read_config(recipe)
    tools = standard_tools(backend_of(recipe))
    with Pool(tools, recipe.backend.name) as evaluator:
        return compare_devices(recipe, devices, tools, progress, evaluator)


def overview(recipe_on: RecipeForDevice, *, progress: Progress | None = None) -> Overview:
    """The recipe's ways to train on every GPU of the catalogue."""
    recipe = recipe_on(True)
    read_config(recipe)
    with Pool(standard_tools(backend_of(recipe)), recipe.backend.name) as pool:
        return over_all(recipe, catalogue(), pool, progress)


def asks_for_overview(recipe: Recipe) -> bool:
    """Whether a recipe, for which no device was named, is for a GPU where this machine has none."""
    plain = recipe.device == "auto" and recipe.mode == "train" and recipe.backend.runs_torch
    return plain and recipe.parallel.one_device and own_device(recipe, "cuda") is None


def own_device(recipe: Recipe, kind: str) -> Device | None:
    """This machine's device of a kind, `cpu` or `cuda`; None where it has none."""
    asked = recipe.model_copy(update={"device": "cpu" if kind == "cpu" else "auto"})
    device = load_backend(recipe.backend.name).device(asked)
    return device if device.kind == kind else None


def target_for(recipe: Recipe, gpu: str | None, gpu_memory: str | None = None) -> Target:
    """The device that a recipe is planned for, see `plan`. Raises RecipeError and Refused."""
    if gpu == "cpu" or (gpu is None and gpu_memory is None and recipe.device == "cpu"):
        if gpu_memory is not None:
            raise RecipeError(f"gpu-memory: {gpu_memory!r} belongs to a GPU, and this plan is for the processor")
        _check_device(recipe, "cpu", "cpu")
        device = own_device(recipe, "cpu")
        assert device is not None
        return own_target(device)
    target = gpu_target(gpu, gpu_memory, lambda: own_device(recipe, "cuda"))
    _check_device(recipe, gpu or "a GPU", "cuda")
    return target


def _check_device(recipe: Recipe, asked: str, kind: str) -> None:
    if recipe.device not in ("auto", kind):
        raise RecipeError(f"device: {recipe.device!r} contradicts planning for {asked}; leave device= out, or use_cpu "
                          "out of the training arguments that it comes from")
