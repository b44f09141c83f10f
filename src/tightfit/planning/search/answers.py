"""What a plan says in words: why this one, what the next best would cost, what would not fit."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.plan import Candidate, Memory
from tightfit.planning.search.budget import Spent
from tightfit.planning.search.candidates import Config, departures_of, numerics, thriftiest
from tightfit.planning.search.exploring import Exploration
from tightfit.planning.search.found import Found
from tightfit.planning.search.probing import Prober
from tightfit.planning.wording import more_or_less, percent, size
from tightfit.recipe import CHOSEN_SLOTS, Recipe
from tightfit.recipe.yaml import technique_to_yaml
from tightfit.techniques import Technique
from tightfit.techniques.optimizer import AdamW
from tightfit.techniques.precision import Bf16, Fp16, Fp32

SHOWN = 5
"""How many candidates that fit are shown."""
SHOWN_TOO_LARGE = 4
"""How many that do not."""
GPUS_TRACED = 3
"""How many GPUs are traced for until one is found that would do."""
LEAST_SHARE = 0.0005
"""Of a speed: what is less is no difference."""


def named(config: Config, micro: int, other: tuple[Config, int] | None = None) -> str:
    """A combination's fields as a person writes them; with `other`, only those that differ from it."""
    parts = [f"micro_batch_size={micro}"] if other is None or other[1] != micro else []
    for slot in CHOSEN_SLOTS:
        mine = getattr(config, slot)
        if other is None or getattr(other[0], slot) != mine:
            parts.append(written(mine))
    return " ".join(parts) or "the same"


def written(technique: Technique) -> str:
    """A technique as a person writes it: `checkpointing=every-nth checkpointing.n=3`."""
    plain = technique_to_yaml(technique)
    if isinstance(plain, str):
        return f"{technique.slot}={plain}"
    knobs = {f"{technique.slot}.{knob}": value for knob, value in plain.items() if knob != "name"}
    texts = [f"{knob}={str(value).lower() if isinstance(value, bool) else value}" for knob, value in knobs.items()]
    return " ".join([f"{technique.slot}={technique.name}", *texts])


def ranked(exploration: Exploration) -> list[Found]:
    """The choice, then the best of every other combination, and of its own at another micro-batch, fastest first,
    better fits before worse ones."""
    best = exploration.best()
    if best is None:
        return []
    others: dict[Config, Found] = {}
    for found in exploration.found.values():
        if found.tier == 3 or found == best:
            continue
        known = others.get(found.config)
        if known is None or (found.tier, -found.speed) < (known.tier, -known.speed):
            others[found.config] = found
    return [best, *sorted(others.values(), key=lambda f: (f.tier, -f.speed))]


def too_large(exploration: Exploration, half: Found | None = None) -> list[Found]:
    """Telling combinations that do not fit, those that miss least first.

    Beside a choice: it at the next larger micro-batch, it without checkpointing, and `half`, see `nearest_in_half`.
    Without one: everything known, where it needs least.
    """
    prober, best = exploration.prober, exploration.best()
    wanted: list[tuple[Config, int]] = []
    if best is not None:
        larger = [micro for micro in prober.sizes if micro > best.micro]
        plain = prober.plain[best.config.family]
        unchecked = best.config.with_checkpointing(plain.checkpointing)
        wanted = [(best.config, micro) for micro in larger[:1]]
        wanted += [(config, best.micro) for config in (unchecked, plain) if config != best.config]
        wanted += [(half.config, half.micro)] if half is not None else []
    else:
        wanted = [(config, leanest(prober, config)) for config in exploration.weighed if prober.knows(config)]
    found: dict[tuple[Config, int], Found] = {}
    for config, micro in wanted:
        if not prober.knows(config):
            continue
        try:
            one = exploration.found.get((config, micro)) or Found(config, micro, prober.estimate(config, micro))
        except (Spent, Refused, ModelError):
            continue
        if one.tier == 3:
            found[config, micro] = one
    return sorted(found.values(), key=lambda f: f.estimate.missing)


def leanest(prober: Prober, config: Config) -> int:
    """The micro-batch at which a combination that is known needs least: the smallest, or the global batch, whose
    gradients are never added to others."""
    return min(prober.sizes, key=lambda micro: prober.peak(config, micro))


def nearest_in_half(exploration: Exploration, best: Found) -> Found | None:
    """Where fp32 was chosen because half precision, which is tried first, leaves too little room: the combination in
    half precision that comes nearest, where it needs least. None elsewhere."""
    recipe, prober = exploration.recipe, exploration.prober
    if recipe.precision != "auto" or exploration.device.kind == "cpu" or best.config.precision.name != "fp32":
        return None
    changed = set(numerics(recipe, best.config))
    half = [config for config in sorted(exploration.weighed, key=repr)
            if isinstance(config.precision, Bf16 | Fp16) and changed.issuperset(numerics(recipe, config))]
    least = thriftiest(half)
    try:
        if least is None or not prober.probe(least):
            return None
        known = [(config, leanest(prober, config)) for config in half if prober.knows(config)]
        nearest, micro = min(known, key=lambda pair: prober.peak(*pair))
        return Found(nearest, micro, prober.estimate(nearest, micro))
    except (Spent, Refused, ModelError):
        return None


def _fastest(exploration: Exploration, best: Found) -> str:
    """What the choice is the best of."""
    fitting = (found for found in exploration.found.values() if found.tier < 3)
    faster = [found for found in fitting if faster_by(found.speed, best.speed) > 0]
    if len(exploration.weighed) == len(exploration.prober.sizes) == 1:
        return "It fits as asked for"
    if not faster:
        return "The fastest that fits"
    if min(found.tier for found in faster) > best.tier:
        return "The fastest that fits with the margin to spare"
    recipe, device = exploration.recipe, exploration.device
    plain = sum(departures_of(recipe, device, best.config))
    plainer = all(sum(departures_of(recipe, device, found.config)) > plain for found in faster)
    return f"Nearly as fast as the fastest that fits, and {'plainer' if plainer else 'takes less memory'}"


def _crowded_out(half: Found, best: Found) -> str:
    """Why nothing in half precision was chosen. half: what comes nearest."""
    name, memory = half.config.precision.name, half.estimate.memory
    nearest = named(half.config, half.micro, (best.config, best.micro))
    copies = "autocast keeps 16-bit copies of the weights beside the weights themselves"
    if half.tier == 3:
        return f"Nothing fits in {name}: {copies}. The nearest, {nearest}, misses {size(memory.missing)}."
    over = memory.peak_reserved - memory.capacity + memory.margin
    return f"Nothing in {name} leaves the margin free: {copies}. The nearest, {nearest}, is {size(over)} over it."


def why(exploration: Exploration, best: Found, device: Device, half: Found | None = None) -> list[str]:
    """Why the choice is. half: see `nearest_in_half`."""
    memory, time = best.estimate.memory, best.estimate.time
    in_use = f"{size(min(memory.used, device.memory_bytes))} of {size(device.memory_bytes)}"
    sentences = [f"{_fastest(exploration, best)}: {time.throughput:,.0f} {time.unit}, with {in_use} in use at the "
                 f"peak, in the {memory.peak_in}; {size(memory.margin)} were to stay free."]
    if best.tier == 1:
        sentences.append(f"It fits once the allocator has given cached memory back, without which it is "
                         f"{size(memory.used)}; that costs a little time.")
    if best.tier == 2:
        sentences.append("It leaves less than the margin free: nothing found leaves more. Expect to be close to the "
                         "device's limit.")
    changed = numerics(exploration.recipe, best.config)
    if changed:
        spare = " with the margin to spare" if best.tier < 2 else ""
        allowed = exploration.recipe.allow_numerics
        reason = "allow_numerics lets it" if allowed else f"nothing that keeps them fits{spare}"
        sentences.append(f"{changing(changed)} numerics: picked because {reason}.")
    if exploration.recipe.optimizer == "auto" and best.config.optimizer.name == "adafactor":
        sentences.append("Adafactor wants another learning rate than AdamW: about 1e-2.")
    if half is not None:
        sentences.append(_crowded_out(half, best))
    return sentences


def changing(changed: Sequence[str]) -> str:
    """What changes something, and the verb."""
    return f"{' and '.join(changed)} change{'s' * (len(changed) == 1)}"


def compared(found: Found, best: Found) -> str:
    """What another combination costs beside the choice."""
    name = named(found.config, found.micro, (best.config, best.micro))
    memory = found.estimate.memory.peak_reserved - best.estimate.memory.peak_reserved
    if found.tier == 3:
        return f"{name} does not fit: {size(found.estimate.missing)} too much."
    remark = {1: "; it fits only after releasing cached memory", 2: "; it leaves less than the margin free"}
    return f"{name}: {beside(faster_by(found.speed, best.speed), memory)}{remark.get(found.tier, '')}."


def faster_by(speed: float, best: float) -> float:
    """By which share a speed is above the choice's; 0 where that is too little to tell."""
    share = speed / best - 1 if best else 0.0
    return share if abs(share) >= LEAST_SHARE else 0.0


def beside(faster: float, memory: int) -> str:
    """A share by which another combination is faster than the choice, and bytes that it reserves more, in words."""
    speed = f"{percent(abs(faster))} {'faster' if faster > 0 else 'slower'}" if faster else "as fast"
    return f"{speed}, {more_or_less(memory)} at the peak"


def misses(name: str, memory: Memory) -> str:
    """By how much a combination of that name does not fit."""
    needed, reserved = size(memory.needed), size(memory.used)
    cached = f" ({reserved} with cached memory, which could be given back)" if reserved != needed else ""
    return (f"{name} does not fit: it needs {needed} at the peak{cached}, in the {memory.peak_in}, "
            f"{size(memory.missing)} more than there are.")


def candidate(exploration: Exploration, found: Found, reasons: list[str]) -> Candidate:
    """A combination as the plan shows it."""
    prober = exploration.prober
    verified = prober.verified(found.config, found.micro)
    if not verified:
        reasons = [*reasons, "Interpolated between traces of the same step at other micro-batches."]
    return Candidate(
        recipe=found.config.on(prober.recipe, found.micro),
        estimate=found.estimate,
        verified=verified,
        changes_numerics=numerics(exploration.recipe, found.config),
        reasons=tuple(reasons),
    )


def still_known(recipe: Recipe) -> str:
    """The end of a sentence on a model that cannot be traced: what its parameters take by the rules of thumb; nothing
    for one that cannot be built."""
    from tightfit.backends.pytorch.model_size import model_size

    try:
        count = model_size(recipe).parameters
    except ModelError:
        return ""
    precision = Fp32() if recipe.precision == "auto" else recipe.precision
    weights = size(precision.weight_bytes * count)
    if recipe.mode == "inference":
        return f"; what can still be said: {count:,} parameters, so {weights} of weights, before any activation"
    optimizer = AdamW() if recipe.optimizer == "auto" else recipe.optimizer
    states = optimizer.bytes_beside(precision.weight_rounding)
    return (f"; what can still be said: {count:,} parameters, so {weights} of weights, {weights} of gradients and "
            f"{size(round(states * count))} of optimizer states, before any activation")
