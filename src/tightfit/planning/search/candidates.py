"""The combinations of techniques that a search weighs: the settings worth trying, less what is refused.

What a person pinned stays. What says `auto` takes each technique's `rungs()`, with these exceptions:

| field | tried | why not the rest |
|---|---|---|
| attention | sdpa with PyTorch's choice of kernel; flex, then eager, where a model has no sdpa; eager too on a processor where sdpa has no fused kernel, as with attention dropout | the choice is the fastest that can run; eager keeps the matrix of scores; flash-attn is for those who name it |
| precision | CUDA: bf16 from compute capability 8.0, fp16 below; where neither fits, fp32 (tf32 from 8.0). CPU: fp32, then bf16 | 16-bit products run at twice the rate at least |
| checkpointing | every rung; memory-budget with a compiler alone | |
| compile | off, per-block with inductor | aot_eager is for debugging; whole costs compile time that grows with depth |
| loss | chunked, which takes less memory and no more time; plain where a task or a model's head cannot have it | |
| optimizer | adamw, fused | the loop and foreach are slower and take more |
| micro_batch_size | between each power of two and the one below, the largest divisor of the global batch; else the power | accumulation of equal micro-batches wastes nothing |

What changes numerics comes in where the recipe allows it, or where nothing else fits: AdamW with 8-bit, 4-bit and
bf16 states, and bf16-pure. Adafactor, which wants another learning rate, comes in where nothing fits even so. Lion and
SGD never do: they want another learning rate too, and save no more than 8-bit AdamW.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import CHOSEN_SLOTS, Recipe
from tightfit.techniques import SLOTS, Attention, Checkpointing, Compile, Loss, Optimizer, Precision, Technique
from tightfit.techniques.attention import Eager, Flex, Sdpa
from tightfit.techniques.checkpointing import EveryBlock
from tightfit.techniques.compile import NoCompile, PerBlock
from tightfit.techniques.loss import Chunked, Plain
from tightfit.techniques.optimizer import Adafactor, AdamW, AdamW4bit, AdamW8bit, AdamWAnyPrecision, Sgd
from tightfit.techniques.precision import Bf16Pure, Fp32, half_precision
from tightfit.trace import Trace

PLAIN = Plain()


@dataclass(frozen=True, kw_only=True)
class Scope:
    """How far a search goes from what a person would write.

    full_precision: fp32 too, where half precision comes first. numerics: fewer bits for states and weights.
    learning_rate: optimizers that want another learning rate. only_where_nothing_fits: only if nothing before it does.
    """

    full_precision: bool = False
    numerics: bool = False
    learning_rate: bool = False
    only_where_nothing_fits: bool = False


def scopes(allow_numerics: bool) -> list[Scope]:
    """How far a search goes, in order. allow_numerics: whether the recipe does."""
    return [
        Scope(),
        *([Scope(numerics=True)] if allow_numerics else []),
        Scope(full_precision=True, only_where_nothing_fits=True),
        Scope(numerics=True, only_where_nothing_fits=True),
        Scope(full_precision=True, numerics=True, only_where_nothing_fits=True),
        Scope(full_precision=True, numerics=True, learning_rate=True, only_where_nothing_fits=True),
    ]


@dataclass(frozen=True)
class Config:
    """One choice in every slot that a search decides."""

    attention: Attention
    precision: Precision
    checkpointing: Checkpointing
    compile: Compile
    optimizer: Optimizer
    loss: Loss = PLAIN

    def on(self, recipe: Recipe, micro_batch: int, batch: int | None = None) -> Recipe:
        """The recipe with these choices and that micro-batch; `batch`: with another global batch too."""
        changes: dict[str, object] = {slot: getattr(self, slot) for slot in CHOSEN_SLOTS}
        changes["micro_batch_size"] = micro_batch
        if batch is not None:
            changes["batch_size"] = batch
        return recipe.model_copy(update=changes)

    @property
    def family(self) -> tuple[Attention, Technique, Loss, Compile]:
        """What decides the forward and backward passes besides checkpointing: how pure bf16 rounds its updates does
        not."""
        return self.attention, self._rounded_to_nearest, self.loss, self.compile

    @property
    def compiled(self) -> bool:
        return self.compile.name != "off"

    def with_plain_sgd(self) -> Config:
        """The same passes with the optimizer that does least."""
        return replace(self, precision=self._rounded_to_nearest, optimizer=Sgd())

    @property
    def _rounded_to_nearest(self) -> Precision:
        precision = self.precision
        return replace(precision, rounding="nearest") if isinstance(precision, Bf16Pure) else precision

    @property
    def update(self) -> tuple[bool, str | None, Optimizer]:
        """What decides the optimizer's step: the weights' format, their rounding, the optimizer."""
        rounding = self.precision.weight_rounding
        return rounding is not None, rounding, self.optimizer

    @property
    def bytes_a_parameter(self) -> float:
        """What a weight, its gradient and its optimizer states take, by rule of thumb."""
        return 2 * self.precision.weight_bytes + self.optimizer.bytes_beside(self.precision.weight_rounding)

    def with_checkpointing(self, checkpointing: Checkpointing) -> Config:
        return replace(self, checkpointing=checkpointing)


def configs(recipe: Recipe, device: Device, scope: Scope, attention: Attention | None = None) -> list[Config]:
    """The combinations of a scope that nothing refuses, plainest first.

    attention: instead of the first choice, where that cannot be built.
    """
    if attention is None or recipe.attention != "auto":
        attention = next(iter(attentions(recipe, device)))
    choices = {slot: list(_values(recipe, device, slot, scope)) for slot in CHOSEN_SLOTS if slot != "attention"}
    found = []
    for chosen in itertools.product(*choices.values()):
        config = Config(attention, **dict(zip(choices, chosen, strict=True)))  # type: ignore[arg-type]
        if _redundant(recipe, config) or config.on(recipe, 1).refusals(device):
            continue
        found.append(config)
    return sorted(found, key=lambda c: departures_of(recipe, device, c))


def attentions(recipe: Recipe, device: Device) -> list[Attention]:
    """The kernels to try, the next one only where those before it cannot be built."""
    if recipe.attention != "auto":
        return [recipe.attention]
    choices: tuple[Attention, ...] = (Sdpa(), Flex(), Eager())
    return [choice for choice in choices if not choice.refuse(recipe, device)]


def eager_may_be_faster(recipe: Recipe, device: Device, attention: Attention, trace: Trace) -> bool:
    """Whether sdpa, in its trace, runs op by op on a processor and keeps the matrix of scores, as eager attention does:
    by the softmax that PyTorch's unfused kernel has to itself. On GPUs the two were never measured side by side."""
    left_open = device.kind == "cpu" and recipe.attention == "auto" and isinstance(attention, Sdpa)
    return left_open and any("_safe_softmax" in op.name for op, _ in trace.step_ops())


def _values(recipe: Recipe, device: Device, slot: str, scope: Scope) -> Iterator[Technique]:
    pinned = getattr(recipe, slot)
    if pinned != "auto":
        yield pinned
    elif slot == "precision":
        yield from _precisions(device, scope)
    elif slot == "checkpointing":
        for variant in SLOTS[slot]:
            yield from variant.rungs()
    elif slot == "loss":
        yield Plain() if Chunked().refuse(recipe, device) else Chunked()
    elif slot == "compile":
        yield NoCompile()
        yield PerBlock.rungs()[0]
    else:
        yield AdamW()
        if scope.numerics:
            yield from (rung for kind in (AdamWAnyPrecision, AdamW8bit, AdamW4bit) for rung in kind.rungs())
        if scope.learning_rate:
            yield from Adafactor.rungs()


def _precisions(device: Device, scope: Scope) -> Iterator[Precision]:
    full, half = Fp32(tf32=device.at_least(8)), half_precision(device)()
    if device.kind == "cpu":
        yield full
        yield half
    else:
        yield half
        if scope.full_precision:
            yield full
    if scope.numerics:
        yield from Bf16Pure.rungs()


def _redundant(recipe: Recipe, config: Config) -> bool:
    """Whether another combination is the same: under pure bf16 AdamW's states are bf16 already."""
    pure = config.precision.weight_rounding is not None
    return pure and isinstance(config.optimizer, AdamWAnyPrecision) and recipe.optimizer == "auto"


def numerics(recipe: Recipe, config: Config) -> tuple[str, ...]:
    """What was picked, where the recipe says `auto`, that changes numerics, as `field=value`.

    Mixed precision is not counted: it is how transformers are trained, and its weights stay fp32.
    """
    found = []
    if recipe.optimizer == "auto" and config.optimizer.exact == "changes":
        found.append(f"optimizer={config.optimizer.name}")
    if recipe.precision == "auto" and config.precision.weight_rounding is not None:
        found.append(f"precision={config.precision.name}")
    return tuple(found)


def departures_of(recipe: Recipe, device: Device, config: Config) -> tuple[int, ...]:
    """How far a combination is from the plainest: changed numerics, a compiler, checkpointing, another precision or
    attention than is usual on the device. What is pinned is no departure."""
    usual = next(_precisions(device, Scope()))
    return (
        len(numerics(recipe, config)),
        int(recipe.compile == "auto" and config.compiled),
        int(recipe.checkpointing == "auto" and config.checkpointing.name != "none"),
        int(recipe.precision == "auto" and config.precision.name != usual.name),
        int(recipe.attention == "auto" and config.attention.name != "sdpa"),
    )


def thriftiest(choices: Sequence[Config]) -> Config | None:
    """Of combinations, plainest first, the one that is likeliest to fit: every block recomputed, fewest bytes of
    weights, gradients and states."""
    if not choices:
        return None
    return min(choices, key=lambda c: (c.bytes_a_parameter, not isinstance(c.checkpointing, EveryBlock),
                                       c.checkpointing.name != "segments", c.attention.name == "eager"))


def micro_batch_sizes(recipe: Recipe) -> list[int]:
    """The micro-batches worth trying, ascending: the pinned one, or one of each octave up to the global batch."""
    batch = recipe.batch_size
    if recipe.micro_batch_size != "auto":
        return [recipe.micro_batch_size]
    divisors = [d for d in range(1, batch + 1) if batch % d == 0] if batch <= 1 << 20 else [batch]
    found = {1, batch}
    power = 2
    while power < batch:
        inside = [d for d in divisors if power // 2 < d <= power]
        found.add(max(inside, key=lambda d: (d % 8 == 0, d), default=power))
        power *= 2
    found |= {batch // parts for parts in (2, 3) if batch % parts == 0}
    return sorted(found)


def check_pins(recipe: Recipe, device: Device) -> None:
    """Raise Refused where what is pinned cannot serve together, naming the one field, or the two, and why."""
    pinned = [slot for slot in CHOSEN_SLOTS if getattr(recipe, slot) != "auto"]
    for count in (1, 2, len(pinned)):
        for slots in itertools.combinations(pinned, count):
            reasons = _always_refused(recipe, device, slots)
            if reasons is not None:
                names = " and ".join(f"{slot}={getattr(recipe, slot).name}" for slot in slots)
                verb = "cannot serve" if count == 1 else "cannot stand together"
                raise Refused(f"{names} {verb} on {device.name}: {'; '.join(reasons)}")


def _always_refused(recipe: Recipe, device: Device, slots: tuple[str, ...]) -> list[str] | None:
    """Why these pins are refused whatever the other fields are; None where some combination is not."""
    everything = [
        [getattr(recipe, slot)] if slot in slots else [rung for kind in SLOTS[slot] for rung in kind.rungs()]
        for slot in CHOSEN_SLOTS
    ]
    kept: list[str] | None = None
    for values in itertools.product(*everything):
        trial = recipe.model_copy(update=dict(zip(CHOSEN_SLOTS, values, strict=True)))
        reasons = [
            f"{slot}: {reason}" for slot in CHOSEN_SLOTS for reason in getattr(trial, slot).refuse(trial, device)
        ]
        if not reasons:
            return None
        ours = [reason for reason in reasons if reason.partition(":")[0] in slots]
        if ours and len(ours) == len(reasons) and (kept is None or len(ours) < len(kept)):
            kept = ours
    return kept


def describe(config: Config, micro: int) -> str:
    """A combination in one line."""
    parts = [f"micro-batch {micro}", config.precision.name, config.checkpointing.name, config.optimizer.name,
             config.attention.name]
    return ", ".join([*parts, *([f"compile {config.compile.name}"] if config.compiled else [])])
