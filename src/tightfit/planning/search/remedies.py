"""What would make a recipe fit: one change of a field, another GPU, offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.estimate import capacity, estimate, unseen
from tightfit.planning.offload import OffloadAdvice, offload_branch
from tightfit.planning.plan import Change, Estimate
from tightfit.planning.savings import savings
from tightfit.planning.search.answers import GPUS_TRACED, leanest, written
from tightfit.planning.search.budget import Spent
from tightfit.planning.search.candidates import Config, Scope, configs, micro_batch_sizes, numerics, thriftiest
from tightfit.planning.search.exploring import Exploration
from tightfit.planning.search.lines import largest_block, parameters
from tightfit.planning.search.probing import Prober
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.techniques.precision import Bf16, Fp16, half_precision
from tightfit.trace import Category, Trace

COMPILING_SAVES = 1.15
"""How far above what there is room for a peak may lie for a compiler to be tried, which spares temporary memory: its
traces take long."""

OPENED = ("micro_batch_size", "precision", "checkpointing", "attention")
"""Fields that a recipe may pin and that save memory without changing numerics, where the search decides them."""


def smallest_change(exploration: Exploration) -> tuple[Change | None, str]:
    """The least change of one field with which something fits, by a trace of the thriftiest combination of the rest,
    and that as a sentence.

    None where no single change helps, or where the limit on traces was reached before one did; the sentence then says
    so, and which changes would help together.
    """
    prober = exploration.prober
    states = min((prober.resident(config) for config in exploration.weighed), default=0)
    try:
        for changes, why in _changes(exploration.recipe, exploration.device):
            if "seq_len" in changes and states > prober.room(spare=True):
                break  # no shorter sequence changes what weights, gradients and states take
            found = _with(exploration, changes, why)
            if found is not None:
                return found, f"The smallest that makes it fit: {found.text} ({found.why})."
        together = _together(exploration)
    except Spent:
        return None, "No single change was found that would make it fit: the limit on traces was reached."
    none = "No single change would make it fit"
    if together is not None:
        return None, f"{none}; together these would: {together.text}{together.why}."
    if states > prober.room(spare=True):
        return None, (f"{none}: weights, gradients and optimizer states alone take {size(states)}, and "
                      f"{size(max(prober.room(spare=True), 0))} are left for them.")
    return None, f"{none}."


def _together(exploration: Exploration) -> Change | None:
    """What fits once the search decides all of OPENED that the recipe pins."""
    recipe = exploration.recipe
    opened = {field: "auto" for field in OPENED if getattr(recipe, field) not in ("auto", 1)}
    return _with(exploration, opened, "") if len(opened) > 1 else None


def _changes(recipe: Recipe, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of what is pinned, the smallest first: those of `savings`, the micro-batch left to the search; then a
    shorter sequence."""
    for saving in savings(recipe, device):
        yield {saving.field: "auto" if saving.field == "micro_batch_size" else saving.value}, saving.why
    shorter = recipe.seq_len // 2 if TASKS[recipe.task].reads == "tokens" else 0
    while shorter >= 128:
        yield {"seq_len": shorter}, "shorter sequences"
        shorter //= 2


def _with(exploration: Exploration, changes: dict[str, Any], why: str) -> Change | None:
    """The change, if something fits with it: of what keeps the numbers, or else of what a search resorts to."""
    outer, device = exploration.prober, exploration.device
    changed = outer.recipe.override(**changes)
    if changed == outer.recipe or changed.refusals(device):
        return None
    sizes = micro_batch_sizes(changed)
    if "micro_batch_size" in changes:
        assert outer.recipe.micro_batch_size != "auto"
        sizes = [micro for micro in sizes if micro < outer.recipe.micro_batch_size]
    else:
        sizes = sizes[:1]
    asked = " ".join(f"{field}={value}" for field, value in changes.items())
    prober, room = outer.beside(changed, sizes, f"whether {asked} would do"), outer.room(spare=True)
    attention = None if "attention" in changes else exploration.attention
    for resort in dict.fromkeys((exploration.recipe.allow_numerics, True)):
        choices = configs(changed, device, Scope(numerics=resort), attention)
        config = thriftiest(choices)
        if config is None or outer.resident(config) > room:
            continue
        found = _largest(prober, config, sizes)
        if found is None and prober.knows(config) and prober.peak(config, sizes[0]) <= COMPILING_SAVES * room:
            compiled = (c for c in choices if c.compile != config.compile and c == replace(config, compile=c.compile))
            config = next(compiled, config)
            found = _largest(prober, config, sizes)
        if found is not None:
            micro, cost = found
            resort_to = " and ".join(numerics(changed, config))
            resorted = f"; with {resort_to}, which changes numerics" if resort_to else ""
            return Change(text=_text(outer.recipe, changes, config, micro), why=why + resorted, estimate=cost)
    return None


def _largest(prober: Prober, config: Config, sizes: Sequence[int]) -> tuple[int, Estimate] | None:
    """The largest micro-batch at which a combination fits with the margin to spare, and what it costs there."""
    prober.plain[config.family] = config
    if not prober.probe(config):
        return None
    for micro in reversed(sizes):
        if prober.peak(config, micro) <= prober.room(config, spare=True):
            cost = prober.estimate(config, micro)
            if cost.safe:
                return micro, cost
    return None


def _text(recipe: Recipe, changes: dict[str, Any], config: Config, micro: int) -> str:
    """Changes as a person writes them: of what the search decides, where its choice differs from the recipe's."""
    parts = []
    for field, value in changes.items():
        if field == "micro_batch_size":
            parts.append(f"{field}={micro}")
        elif value != "auto":
            parts.append(f"{field}={value}")
        elif getattr(config, field) != getattr(recipe, field):
            parts.append(written(getattr(config, field)))
    return " ".join(parts)


def probe_thriftiest(exploration: Exploration, among: Sequence[Config] | None = None) -> None:
    """Learn what the thriftiest combination costs, of a family of passes that is known where there is one."""
    prober = exploration.prober
    choices = sorted(exploration.weighed if among is None else among, key=repr)
    least = thriftiest([c for c in choices if prober.knows(prober.plain[c.family])] or choices)
    if least is not None:
        with contextlib.suppress(Spent):
            prober.probe(least)


def smallest_gpu(exploration: Exploration, catalogue: Sequence[Device]) -> tuple[Device | None, str]:
    """The smallest GPU of the catalogue on which the recipe as written fits, and that as a sentence.

    Judged by this device's traces, then traced for that GPU itself. What changes numerics counts only where the recipe
    allows it.
    """
    prober, recipe, device = exploration.prober, exploration.recipe, exploration.device
    if device.kind != "cuda" or not catalogue:
        return None, ""
    allowed = [c for c in exploration.weighed if recipe.allow_numerics or not numerics(recipe, c)]
    fits = any(found.tier < 3 and found.config in allowed for found in exploration.found.values())
    probe_thriftiest(exploration, allowed)
    known = [config for config in allowed if prober.knows(config)]
    too_small: list[Device] = []
    least = 0
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        if fits and gpu.memory_bytes >= device.memory_bytes:
            break
        if gpu.memory_bytes <= least:
            continue
        resolved = _served(recipe, prober, known, gpu)
        if resolved is None:
            continue
        try:
            if len(too_small) == GPUS_TRACED:
                raise Spent
            trace = prober.predict(resolved, gpu, f"whether {gpu.name} would do")
        except Spent:
            tried = f"{too_small[-1].name} is too small, and l" if too_small else "L"
            return None, f"{tried}arger GPUs of the catalogue were not traced: the limit on traces was reached."
        except (Refused, ModelError):
            continue
        cost = estimate(trace, resolved, gpu, prober.tools, prober.margin)
        if cost.safe:
            assert resolved.checkpointing != "auto"
            text = (f"The smallest GPU on which the recipe as written fits is {gpu.name} ({size(gpu.memory_bytes)}): "
                    f"{size(cost.memory.used)} in use with micro_batch_size={resolved.micro_batch_size} "
                    f"{written(resolved.checkpointing)}.")
            return gpu, text
        too_small.append(gpu)
        least = max(gpu.memory_bytes, cost.memory.needed)
    if fits:
        return device, f"No smaller GPU of the catalogue than {device.name} would do."
    return None, "No GPU of the catalogue was found on which the recipe as written fits."


def _served(recipe: Recipe, prober: Prober, known: Sequence[Config], gpu: Device) -> Recipe | None:
    """What needs least of the known combinations that may fit a GPU and that it does not refuse, resolved; compiled
    only where nothing else may fit, for its trace takes long."""
    able = {config: leanest(prober, config) for config in known}
    for config, micro in sorted(able.items(), key=lambda pair: (pair[0].compiled, prober.peak(*pair))):
        room = capacity(prober.trace_of(config), gpu) - prober.margin.of(gpu)
        there = _as_on(recipe, config, gpu).on(prober.recipe, micro)
        if prober.rounding * prober.peak(config, micro) <= room and not there.refusals(gpu):
            return there
    return None


def _as_on(recipe: Recipe, config: Config, gpu: Device) -> Config:
    """The combination as `auto` would have it on that GPU: which half precision depends on what it computes in."""
    if recipe.precision == "auto" and isinstance(config.precision, (Bf16, Fp16)):
        return replace(config, precision=half_precision(gpu)())
    return config


def offload(exploration: Exploration, host_bytes: int) -> OffloadAdvice | None:
    """The branch of the offload tree for a recipe of which nothing fits, from the thriftiest trace there is."""
    prober = exploration.prober
    known = [config for config in exploration.weighed if prober.knows(config)]
    if not known:
        return None
    trace = min((prober.trace_of(config) for config in known), key=_passing)
    return offload_branch(
        fits=False, parameters=parameters(trace), largest_block=largest_block(trace),
        other_bytes=_passing(trace) + unseen(trace, "context") + unseen(trace, "allocator"),
        device_bytes=exploration.device.memory_bytes, host_bytes=host_bytes,
    )


def _passing(trace: Trace) -> int:
    """The most that a step holds besides weights, their half-precision copies, gradients and states."""
    kept = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)
    copies = ("aten._to_copy", "aten.to")
    passing = [
        a for a in trace.allocations
        if a.category not in kept and not (a.category is Category.TEMPORARY and a.op.startswith(copies))
    ]
    ends = [span for span in trace.spans if span.name in ("forward", "backward")]
    start, stop = min((s.start for s in ends), default=0), max((s.stop for s in ends), default=None)
    return replace(trace, allocations=passing).peak(start, stop)[1]
