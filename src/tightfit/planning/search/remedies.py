"""What would make a recipe fit: one change of a field, another GPU, offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.estimate import capacity, estimate, unseen
from tightfit.planning.plan import Change
from tightfit.planning.search.candidates import Config, Scope, configs, micro_batch_sizes, numerics
from tightfit.planning.search.exploring import Exploration
from tightfit.planning.search.lines import largest_block, parameters
from tightfit.planning.search.offload import OffloadAdvice, offload_branch
from tightfit.planning.search.probing import Prober, Spent
from tightfit.planning.wording import size
from tightfit.recipe import Recipe
from tightfit.techniques.checkpointing import EveryBlock
from tightfit.techniques.precision import Bf16, Fp16
from tightfit.trace import Category, Trace

GPUS_TRACED = 2
"""How many GPUs are traced for until one is found on which a recipe fits."""


def smallest_change(exploration: Exploration) -> Change | None:
    """The least change of one field with which something fits, by a trace of the thriftiest combination of the rest.

    None where no single change helps, or where the limit on traces was reached before one did.
    """
    for changes, why in _changes(exploration.recipe, exploration.device):
        if "seq_len" in changes and not _states_fit(exploration):
            return None
        try:
            found = _with(exploration, changes, why)
        except Spent:
            return None
        if found is not None:
            return found
    return None


def _states_fit(exploration: Exploration) -> bool:
    """Whether weights, gradients and states alone leave room in some combination, which no shorter sequence changes."""
    prober = exploration.prober
    return any(prober.resident(config) <= prober.room(spare=True) for config in exploration.weighed)


def _changes(recipe: Recipe, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of what is pinned, the smallest first: what keeps the numbers, what changes them, a shorter sequence."""
    micro = recipe.micro_batch_size
    if micro != "auto" and micro > 1:
        yield {"micro_batch_size": "auto"}, "the same global batch, more accumulation"
    if recipe.attention != "auto" and recipe.attention.name == "eager":
        yield {"attention": "sdpa"}, "no matrix of scores"
    if recipe.checkpointing != "auto" and recipe.checkpointing.name != "every-block":
        yield {"checkpointing": "selective"}, "cheap results are computed again"
        yield {"checkpointing": "every-block"}, "activations are computed again, 20 to 30 % slower"
    if recipe.precision != "auto" and recipe.precision.name == "fp32":
        yield {"precision": "bf16"}, "activations halve"
        yield {"precision": "fp16"}, "activations halve"
    if recipe.optimizer != "auto" and recipe.optimizer.state_bytes > 2:
        yield {"optimizer": "adamw-8bit"}, "2 bytes of states a parameter instead of 8; changes numerics"
    if recipe.precision != "auto" and recipe.precision.weight_rounding is None:
        yield {"precision": "bf16-pure"}, "2 bytes a weight and a gradient; changes numerics"
    shorter = recipe.seq_len // 2
    while shorter >= 128:
        yield {"seq_len": shorter}, "shorter sequences"
        shorter //= 2


def _with(exploration: Exploration, changes: dict[str, Any], why: str) -> Change | None:
    """The change, if something fits with it."""
    outer, device = exploration.prober, exploration.device
    changed = outer.recipe.override(**changes)
    if changed == outer.recipe or changed.refusals(device):
        return None
    choices = configs(changed, device, Scope(numerics=exploration.recipe.allow_numerics))
    config = thriftiest(choices)
    if config is None:
        return None
    sizes = micro_batch_sizes(changed)
    if "micro_batch_size" in changes:
        assert outer.recipe.micro_batch_size != "auto"
        sizes = [micro for micro in sizes if micro < outer.recipe.micro_batch_size]
    else:
        sizes = sizes[:1]
    prober = outer.beside(changed, sizes)
    prober.plain[config.family] = config
    if not prober.probe(config):
        return None
    for micro in reversed(sizes):
        if prober.peak(config, micro) <= prober.room(config, spare=True):
            cost = prober.estimate(config, micro)
            if cost.safe:
                text = " ".join(f"{field}={micro if field == 'micro_batch_size' else value}"
                                for field, value in changes.items())
                return Change(text=text, why=why, estimate=cost)
    return None


def thriftiest(choices: Sequence[Config]) -> Config | None:
    """Of combinations, plainest first, the one that is likeliest to fit: every block recomputed, fewest bytes of
    states."""
    if not choices:
        return None
    return min(choices, key=lambda c: (c.optimizer.state_bytes * (c.precision.weight_rounding is None or 0.5),
                                       not isinstance(c.checkpointing, EveryBlock), c.checkpointing.name != "segments"))


def probe_thriftiest(exploration: Exploration, among: Sequence[Config] | None = None) -> None:
    """Learn what the thriftiest combination costs, of a family of passes that is known where there is one."""
    prober = exploration.prober
    choices = list(exploration.weighed) if among is None else list(among)
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
    traced = 0
    for gpu in sorted(catalogue, key=lambda d: (d.memory_bytes, d.name)):
        if fits and gpu.memory_bytes >= device.memory_bytes:
            break
        able = [config for config in known if _can_fit(prober, config, gpu)]
        there = [_as_on(recipe, config, gpu) for config in sorted(able, key=lambda c: prober.peak(c, prober.sizes[0]))]
        served = next((c for c in there if not c.on(prober.recipe, prober.sizes[0]).refusals(gpu)), None)
        if served is None:
            continue
        if traced == GPUS_TRACED:
            return None, ""
        traced += 1
        resolved = served.on(prober.recipe, prober.sizes[0])
        try:
            trace = prober.predict(resolved, gpu, f"on {gpu.name}")
        except Spent:
            return None, ""
        except (Refused, ModelError):
            continue
        cost = estimate(trace, resolved, gpu, prober.tools, prober.margin)
        if cost.safe:
            text = (f"The smallest GPU on which the recipe as written fits is {gpu.name} ({size(gpu.memory_bytes)}): "
                    f"{size(cost.memory.used)} in use with micro_batch_size={prober.sizes[0]}, "
                    f"checkpointing={served.checkpointing.name}.")
            return gpu, text
    if fits:
        return device, f"No smaller GPU of the catalogue than {device.name} would do."
    return None, "No GPU of the catalogue was found on which the recipe as written fits."


def _can_fit(prober: Prober, config: Config, gpu: Device) -> bool:
    room = capacity(prober.trace_of(config), gpu) - prober.margin.of(gpu)
    return prober.peak(config, prober.sizes[0]) <= room


def _as_on(recipe: Recipe, config: Config, gpu: Device) -> Config:
    """The combination as `auto` would have it on that GPU: which half precision depends on what it computes in."""
    if recipe.precision == "auto" and isinstance(config.precision, (Bf16, Fp16)):
        return replace(config, precision=Bf16() if gpu.at_least(8) else Fp16())
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
