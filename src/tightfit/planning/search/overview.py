"""Every GPU of the catalogue for one model: what fits by training all of it, with host memory's help, and by adapters.

One trace serves many cards: what a step allocates follows, closely enough for an overview, whether the card has flash
attention, and what differs beyond that (context, workspaces, speed) is each card's own. A way has few recipes, the
faster first; no search is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.allocator.replay import Replay
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.costs import Memory, Time
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Tools, predict_memory, training_time
from tightfit.planning.search.adapters import ADAPTERS
from tightfit.planning.search.evaluate import InProcess, Progress
from tightfit.planning.search.pool import Pool
from tightfit.recipe import Recipe
from tightfit.techniques.checkpointing import TiledMlp
from tightfit.techniques.offload import Host
from tightfit.trace import Trace

SMALLEST: Mapping[str, Any] = {"micro_batch_size": 1}
LEAST_MEMORY: Mapping[str, Any] = {"checkpointing": "every-block", "loss": "chunked", "compile": "off"}
"""The values of the fields that are open: those of least memory, and of least time to trace, but for long sequences'
tiles."""
COMPILED: Mapping[str, Any] = {**SMALLEST, "compile": "per-block"}
"""Settings without autocast's 16-bit copies of all weights at once, which an eager step keeps; slower to trace."""
WAYS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "all weights": tuple({"offload": "none", **more} for more in ({}, SMALLEST, COMPILED)),
    "offload=host": ({"offload": Host(activations=1, embeddings=True)},),  # whose traces take longest
    **{name: tuple({**way, "offload": "none", **more} for more in ({}, SMALLEST)) for name, way in ADAPTERS.items()},
}
"""Ways to train a model, each with its recipes in the order in which they are tried."""
AS_WRITTEN: Mapping[str, tuple[Mapping[str, Any], ...]] = {"as written": ({}, SMALLEST, COMPILED)}
"""The way of a recipe that says what is trained, or what waits in host memory."""


@dataclass(frozen=True, kw_only=True)
class GpuEstimate:
    """The memory and time of a resolved recipe on a card. time: None where it does not fit with the margin free."""

    recipe: Recipe
    memory: Memory
    time: Time | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes as integers, times in seconds."""
        return {"fits": self.time is not None, "recipe": self.recipe.to_dict(), "memory": self.memory.to_json(),
                "time": None if self.time is None else self.time.to_json()}


@dataclass(frozen=True, kw_only=True)
class GpuSummary:
    """One GPU. ways: by name, the estimate of the first recipe that fits, or else of the last one; the reason as a text
    where the card refuses each."""

    device: Device
    ways: Mapping[str, GpuEstimate | str]


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A model on every GPU, the smallest first. traces: how many were made."""

    asked: Recipe
    cards: tuple[GpuSummary, ...]
    traces: int = 0

    @property
    def fitting(self) -> bool:
        """Whether anything fits anywhere."""
        return any(self.smallest.values())

    @property
    def smallest(self) -> dict[str, Device | None]:
        """For each way the smallest card on which it fits; None where there is none."""
        def trains(card: GpuSummary, name: str) -> bool:
            return isinstance(estimate := card.ways[name], GpuEstimate) and estimate.time is not None

        return {name: next((card.device for card in self.cards if trains(card, name)), None)
                for name in self.cards[0].ways}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        smallest = {name: device and device.name for name, device in self.smallest.items()}
        rows = [{"device": {"name": card.device.name, "memory_bytes": card.device.memory_bytes},
                 "ways": {name: {"refused": estimate} if isinstance(estimate, str) else estimate.to_json()
                          for name, estimate in card.ways.items()}} for card in self.cards]
        return {"smallest": smallest, "gpus": rows}


def overview(recipe: Recipe, devices: Iterable[Device], pool: Pool, progress: Progress | None = None) -> Overview:
    """Each way to train a recipe on each device: whether it fits, and how fast it is. Raises TightfitError where no
    trace can be made."""
    ordered = sorted(devices, key=lambda device: (device.memory_bytes, device.name))
    pinned = recipe.trainable.freezes or recipe.offload != "auto"
    ways = AS_WRITTEN if pinned else WAYS
    found: dict[tuple[str, str], GpuEstimate | str] = {}
    failures: list[TightfitError] = []
    done = 0
    for attempt in range(max(map(len, ways.values()))):
        jobs: list[tuple[str, Recipe, tuple[Device, ...]]] = []
        for name, recipes in ways.items():
            if attempt < len(recipes):
                compiled = "compile" in recipes[attempt]
                left = [device for device in ordered if _may_fit(found.get((name, device.name)), device, compiled)]
                tried = {repr(each.recipe) for each in found.values() if isinstance(each, GpuEstimate)}
                jobs += [(name, resolved, group)
                         for resolved, group in _jobs(recipe, name, recipes[attempt], left, found)
                         if repr(resolved) not in tried]
        report = progress and partial(_report, progress, done, [f"{name} on {each[0].name}" for name, _, each in jobs])
        outcomes = pool.each(estimate_on_cards, [job[1:] for job in jobs], report)
        done += len(jobs)
        for (name, _, group), estimates in zip(jobs, outcomes, strict=True):
            if isinstance(estimates, TightfitError):
                failures.append(estimates)
                found |= {(name, device.name): str(estimates) for device in group if (name, device.name) not in found}
            else:
                found |= {(name, device.name): estimate for device, estimate in zip(group, estimates, strict=True)}
    if failures and not any(isinstance(estimate, GpuEstimate) for estimate in found.values()):
        raise failures[0]
    cards = tuple(GpuSummary(device=device, ways={name: found[name, device.name] for name in ways})
                  for device in ordered)
    return Overview(asked=recipe, cards=cards, traces=done)


def estimate_on_cards(
    evaluator: InProcess, recipe: Recipe, devices: Sequence[Device]
) -> list[GpuEstimate] | TightfitError:
    """The memory and time of a resolved recipe on cards of one generation, by a trace for the first of them."""
    tools, replays = evaluator.tools, dict[int, Replay]()

    def replay(trace: Trace, room: int | None, settings: AllocatorSettings) -> Replay:
        kept = trace.untraced_bytes("allocator")
        if kept not in replays:  # beyond what is kept in it the allocator is the same on each
            replays[kept] = evaluator.tools.replay(trace, None, settings)
        free = replays[kept]
        missing = 0 if room is None else max(free.peak_reserved - room, 0)
        return replace(free, fits="no" if missing else "yes", missing=missing)

    try:
        trace = tools.predict(recipe, devices[0])
        return [_estimate(trace, recipe, device, replace(tools, replay=replay)) for device in devices]
    except TightfitError as error:
        return error


def _estimate(trace: Trace, recipe: Recipe, device: Device, tools: Tools) -> GpuEstimate:
    trace = replace(trace, untraced=tools.untraced(recipe, device, trace))
    memory = predict_memory(trace, recipe, device, tools)
    time = training_time(trace, recipe, device, tools)[0] if memory.fit_rank.is_safe else None
    return GpuEstimate(recipe=recipe, memory=memory, time=time)


def _jobs(
    recipe: Recipe, name: str, way: Mapping[str, Any], devices: Sequence[Device],
    found: dict[tuple[str, str], GpuEstimate | str],
) -> list[tuple[Recipe, tuple[Device, ...]]]:  # fmt: skip
    """The recipes of a way of that name, resolved, each with the devices that one trace of it serves. found: gets the
    reasons of the others."""
    groups: dict[tuple[str, bool], tuple[Recipe, list[Device]]] = {}
    for device in devices:
        reasons: list[str] = []
        plain = {"loss": "plain"}  # which alone some tasks have
        for milder in ({}, plain):
            tiles = TiledMlp.search_settings(recipe, device)
            least = {**LEAST_MEMORY, "checkpointing": tiles[0]} if tiles else LEAST_MEMORY
            open_fields = {field: value for field, value in {**least, **way, **milder}.items()
                           if getattr(recipe, field) == "auto" or field in ("trainable", "base")}
            resolved = resolve(recipe.override(**open_fields), device)
            if recipe.expandable_segments == "auto":
                resolved = resolved.model_copy(update={"expandable_segments": True})
            reasons = resolved.refusals(device)
            if not reasons:
                key = (repr(resolved), device.has_flash)
                groups.setdefault(key, (resolved, []))[1].append(device)
                break
        if reasons:
            found.setdefault((name, device.name), "; ".join(reasons))
    return [(resolved, tuple(group)) for resolved, group in groups.values()]


def _may_fit(estimate: GpuEstimate | str | None, device: Device, compiled: bool) -> bool:
    """Whether another recipe of the way may do where this one does not: not where weights and optimizer states alone
    are more than the card has; a compiled one, where less is lacking than the 16-bit copies take, half the weights."""
    if not isinstance(estimate, GpuEstimate):
        return estimate is None
    weights, states = (estimate.memory.by_category.get(name, 0) for name in ("weights", "optimizer"))
    near = not compiled or estimate.memory.demand - device.memory_bytes < weights / 2
    return estimate.time is None and weights + states < device.memory_bytes and near


def _report(progress: Progress, before: int, names: Sequence[str], done: int) -> None:
    progress(before + done, None, f"now {names[done]}" if done < len(names) else "done")
