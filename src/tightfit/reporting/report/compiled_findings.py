"""What matters in a step that a compiler laid out as a whole: its largest arrays, what its loops stack up, and what it
computes again.

Gains are upper bounds: the bytes of the arrays that would go, or the seconds of what would not be done, as measured, or
where nothing was, by the time model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tightfit.profiles import Profile
from tightfit.reporting.report.breakdown import TimedOp, busy_seconds, module_name, whole
from tightfit.reporting.report.improvement import WORTH_SAYING, Improvement
from tightfit.reporting.report.memory import step_of
from tightfit.reporting.report.wording import percent, size
from tightfit.trace import Allocation, Category, Phase, Trace

STACKING = "dynamic-update-slice"
BLOCKS = "layers"
"""The scope of what every block makes: recomputing blocks frees nothing else."""
ROOM = 0.5
"""Share of a device's memory below which there may be room for every activation."""


def compiled_findings(profile: Profile, trace: Trace, ops: Sequence[TimedOp]) -> list[Improvement]:
    """The findings, in no order."""
    found = [_largest(profile, trace), _stacked(profile, ops), _again(profile, trace, ops)]
    return [each for each in found if each is not None]


def _largest(profile: Profile, trace: Trace) -> Improvement | None:
    """The largest arrays at the peak besides the state; gradients, which have a weight's shape, count as that."""
    step = step_of(trace)
    tick, peak = trace.peak(step.start, step.stop)
    state = {a.shape for a in trace.allocations if a.category is Category.WEIGHTS}
    held = [a for a in trace.alive(tick) if a.holds(tick) is Category.TEMPORARY and a.shape and a.shape not in state]
    if not held or held[0].bytes < WORTH_SAYING * peak:
        return None
    together: dict[tuple[object, ...], int] = defaultdict(int)
    for a in held:
        together[a.shape, a.dtype] += a.bytes
    worst = max(held, key=lambda a: (a.bytes, together[a.shape, a.dtype]))
    alike = [a for a in held if (a.shape, a.dtype) == (worst.shape, worst.dtype)]
    change, gain, derived = _fewer(profile, worst, together[worst.shape, worst.dtype])
    many = f", and {len(alike) - 1} more of its shape" if len(alike) > 1 else ""
    return Improvement(
        sentence=f"the largest array at the peak is {worst.dtype} {'x'.join(map(str, worst.shape))}, "
                 f"{size(worst.bytes)}: {_source(worst)}{many}",
        change=change, bytes=gain if change else None, derived=derived,
        rank=gain / (profile.capacity_bytes or peak),
    )  # fmt: skip


def _source(made: Allocation) -> str:
    op = made.op.removeprefix("fused ")
    said = "stacked by a loop for the backward pass" if STACKING in op else op
    return f"{said}, in {module_name(made.module)}" if made.module else said


def _fewer(profile: Profile, worst: Allocation, together: int) -> tuple[str, int, str]:
    """A change that takes such arrays away or makes them smaller, the bytes, and how they were derived."""
    recipe = profile.recipe
    eager = getattr(recipe.attention, "name", "") == "eager"
    narrow = getattr(recipe.precision, "name", "") in ("bf16", "fp16", "bf16-pure")
    if "softmax" in worst.module and eager and narrow and profile.device.kind == "cuda":
        return "attention=sdpa attention.kernel=cudnn", together, "a fused kernel keeps no matrix of scores"
    if getattr(recipe.checkpointing, "name", "") == "none" and worst.module.startswith(BLOCKS):
        return "checkpointing=every-block", together, (
            "the backward pass computes a block's arrays again instead of keeping every block's")
    micro = recipe.micro_batch_size
    if isinstance(micro, int) and micro > 1:
        return f"micro_batch_size={micro // 2}", together - together * (micro // 2) // micro, (
            "activations grow in proportion to the micro-batch")
    return "", together, "no field of the recipe makes them smaller"


def _stacked(profile: Profile, ops: Sequence[TimedOp]) -> Improvement | None:
    """A loop over layers copies what each of them leaves into arrays that hold every layer's."""
    taken, step = busy_seconds(each for each in ops if STACKING in each.op.name), whole(profile, ops)
    if getattr(profile.recipe.backend, "layers", "") != "scanned" or not step or taken < WORTH_SAYING * step:
        return None
    return Improvement(
        sentence=f"{percent(taken / step)} of the step stacks what the loop over layers leaves ({STACKING})",
        change="backend.layers=unrolled", seconds=taken / step, rank=taken / step,
        derived="unrolled layers leave their arrays where they are; at most all of that time goes, and the program "
                "takes longer to compile",
    )  # fmt: skip


def _again(profile: Profile, trace: Trace, ops: Sequence[TimedOp]) -> Improvement | None:
    """What the backward pass computes a second time."""
    taken, step = busy_seconds(each for each in ops if each.op.phase is Phase.RECOMPUTE), whole(profile, ops)
    if not step or taken < WORTH_SAYING * step:
        return None
    room = profile.capacity_bytes
    there = bool(room) and trace.peak()[1] <= ROOM * room
    sentence = (f"{percent(taken / step)} of the step computes activations again in the backward pass "
                "(rematted_computation)")
    if not there:
        return Improvement(sentence=sentence, change="", rank=taken / step / 2,  # half: it is what memory costs
                           derived="it is the price of the memory that checkpointing saves")
    return Improvement(
        sentence=sentence, change="checkpointing=none", seconds=taken / step, rank=taken / step,
        derived=f"at most all of that time goes; {percent(1 - trace.peak()[1] / room)} of the memory is free, and "
                "tightfit plan says whether every activation fits in it",
    )  # fmt: skip
