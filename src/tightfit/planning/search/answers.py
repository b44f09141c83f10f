"""What a plan says in words: why this one, what the next best would cost, what would not fit."""

from __future__ import annotations

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.models import read_config
from tightfit.planning.plan import Candidate
from tightfit.planning.search.candidates import Config, numerics
from tightfit.planning.search.exploring import Exploration, Found
from tightfit.planning.search.probing import Spent
from tightfit.planning.wording import percent, size
from tightfit.recipe import Recipe
from tightfit.recipe_text import technique_to_yaml
from tightfit.shapes import shape_of
from tightfit.techniques import Technique

SHOWN = 5
"""How many candidates that fit are shown."""
SHOWN_TOO_LARGE = 3
"""How many that do not."""


def named(config: Config, micro: int, other: tuple[Config, int] | None = None) -> str:
    """A combination's fields as a person writes them; with `other`, only those that differ from it."""
    parts = [f"micro_batch_size={micro}"] if other is None or other[1] != micro else []
    for slot in ("precision", "checkpointing", "optimizer", "attention", "compile"):
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


def too_large(exploration: Exploration) -> list[Found]:
    """Telling combinations that do not fit, those that miss least first.

    Beside a choice: it at the next larger micro-batch, and it without checkpointing. Without one: everything known at
    the smallest micro-batch.
    """
    prober, best = exploration.prober, exploration.best()
    wanted: list[tuple[Config, int]] = []
    if best is not None:
        larger = [micro for micro in prober.sizes if micro > best.micro]
        plain = prober.plain[best.config.family]
        unchecked = best.config.with_checkpointing(plain.checkpointing)
        wanted = [(best.config, micro) for micro in larger[:1]]
        wanted += [(config, best.micro) for config in (unchecked, plain) if config != best.config]
    else:
        wanted = [(config, prober.sizes[0]) for config in exploration.weighed]
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


def why(exploration: Exploration, best: Found, device: Device) -> list[str]:
    """Why the choice is."""
    memory = best.estimate.memory
    unit = "tokens/s" if best.estimate.time.tokens_per_second else "samples/s"
    speed = best.estimate.time.tokens_per_second or best.speed
    sentences = [
        f"The fastest that fits: {speed:,.0f} {unit}, with {size(memory.used)} of {size(device.memory_bytes)} in use "
        f"at the peak, in the {memory.peak_in}; {size(memory.margin)} were to stay free."
    ]
    if best.tier == 1:
        sentences.append("It fits once the allocator has given cached memory back, which costs a little time.")
    if best.tier == 2:
        sentences.append("It leaves less than the margin free: nothing found leaves more. Expect to be close to the "
                         "device's limit.")
    changed = numerics(exploration.recipe, best.config)
    if changed:
        reason = "allow_numerics lets it" if exploration.recipe.allow_numerics else "nothing else fits"
        sentences.append(f"{' and '.join(changed)} changes numerics: picked because {reason}.")
    if exploration.recipe.optimizer == "auto" and best.config.optimizer.name == "adafactor":
        sentences.append("Adafactor wants another learning rate than AdamW: about 1e-2.")
    return sentences


def compared(found: Found, best: Found) -> str:
    """What another combination costs beside the choice."""
    name = named(found.config, found.micro, (best.config, best.micro))
    memory = found.estimate.memory.peak_reserved - best.estimate.memory.peak_reserved
    bytes_text = f"{size(abs(memory))} {'more' if memory > 0 else 'less'} at the peak"
    if found.tier == 3:
        return f"{name} does not fit: {size(found.estimate.missing)} too much."
    share = found.speed / best.speed - 1 if best.speed else 0.0
    speed = f"{percent(abs(share))} {'faster' if share > 0 else 'slower'}" if abs(share) >= 0.0005 else "as fast"
    remark = {1: "; it fits only after releasing cached memory", 2: "; it leaves less than the margin free"}
    return f"{name}: {speed}, {bytes_text}{remark.get(found.tier, '')}."


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
    """What can be said of a model that cannot be traced: what its shape says, by the rules of thumb."""
    try:
        count = shape_of(read_config(recipe), recipe.task).parameters
    except (ModelError, ArithmeticError, TypeError, ValueError):  # numbers that make no model make no shape either
        return "its configuration does not state its size either"
    pure = recipe.precision != "auto" and recipe.precision.weight_rounding is not None
    weights = size((2 if pure else 4) * count)
    if recipe.mode == "inference":
        return f"what can still be said: {count:,} parameters, so {weights} of weights, before any activation"
    states = 8.0 if recipe.optimizer == "auto" else recipe.optimizer.state_bytes
    return (f"what can still be said: {count:,} parameters, so {weights} of weights, {weights} of gradients and "
            f"{size(round(states * count))} of optimizer states, before any activation")
