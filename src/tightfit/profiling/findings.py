"""Findings of a profile: the table RULES, each of which looks for one thing in a step.

A gain is an upper bound, predicted and not measured, from the measured seconds and bytes and, for padding, from the
time model, which is not calibrated here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from tightfit import text
from tightfit.planning.alignment import has_side, misaligned, padding_gain, vocabulary
from tightfit.planning.defaults import WORKERS
from tightfit.profiling.profile import Profile
from tightfit.profiling.step import ProfiledStep, block_name, steps_of
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.techniques.loading import enough_workers, preparing_seconds
from tightfit.trace import FUSED_PREFIX, Allocation, Category, Phase

WORTH_SAYING = 0.01
"""Plain steps differ by as much: below it a finding is noise."""
MOST_WORKERS = 16
"""Data workers that are proposed, at most: no more cores may be there."""
ROOM_SHARE = 0.5
"""Share of a device's memory below which there may be room for every activation."""
MERGED_COPIES = ("_to_copy", "copy_", "clone", "contiguous", "cat")
"""Copies that a compiler merges into their neighbours."""
COPY_OPS = frozenset({
    *MERGED_COPIES, "copy", "stack", "_chunk_cat", "repeat", "roll", "flip", "constant_pad_nd", "split_with_sizes_copy",
    "narrow_copy", "as_strided_copy", "permute_copy", "transpose_copy", "_foreach_copy_", "_pin_memory",
})  # fmt: skip
COPY_KERNEL = "Memcpy"
"""Prefixes of the names of CUDA's own copies, which belong to no op."""
STACKING = "dynamic-update-slice"
BLOCKS_SCOPE = "layers"
"""The scope of what every block of a compiled step makes: recomputing blocks frees nothing else."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """share: of the step, or of the memory at its peak, that it is about. sentence: what was found, with its figure.
    change: what to write in the recipe, `key=value`; empty where no field helps. seconds: predicted gain as a share of
    the step. bytes: predicted gain of peak memory. derived: how the gain was predicted, as a sentence. rank: what
    findings are sorted by."""

    share: float
    sentence: str
    derived: str
    change: str = ""
    seconds: float | None = None
    bytes: int | None = None
    rank: float = 0.0

    @property
    def gain(self) -> str:
        """The predicted gain for reading."""
        if self.seconds is not None:
            return f"up to {text.percent(self.seconds)} of the step"
        return "not predicted" if self.bytes is None else f"up to {text.size(self.bytes)} at the peak"


class Rule(NamedTuple):
    """look: yields what it finds in a profile's step: the measured one, or the predicted one where nothing was
    measured. least: the share below which that is left out. compiled: whether it is for steps that
    a compiler laid out as a whole, or for others; None for both."""

    look: Callable[[Profile, ProfiledStep], Iterator[Finding]]
    least: float = WORTH_SAYING
    compiled: bool | None = None


def findings(profile: Profile) -> list[Finding]:
    """All findings, the one that matters most first."""
    steps = steps_of(profile)
    if not steps:
        return []
    step = next(iter(steps.values()))
    rules = [rule for rule in RULES if rule.compiled in (None, step.trace.laid_out)]
    room = profile.capacity_bytes or step.peak[1]
    found = [each for rule in rules for each in rule.look(profile, step) if each.share >= rule.least]
    return sorted((replace(each, rank=_rank(each, room)) for each in found), key=lambda each: -each.rank)


def _rank(found: Finding, room: int) -> float:
    """The gain, as a share of the step or of the memory, where it was predicted; else the finding's own share."""
    if found.seconds is not None:
        return found.seconds
    if found.bytes is not None:
        return found.bytes / room if room else 0.0
    return found.share if found.change else found.share / 2  # half: there is nothing to write


def _data(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """The wait for a global batch, which workers could prepare meanwhile."""
    waits, whole = profile.phase_seconds.get(Phase.DATA, 0.0), profile.step_seconds
    if not whole:
        return
    written = profile.recipe.loading.workers
    now = written if isinstance(written, int) else WORKERS[profile.device.kind]
    workers = max(min(enough_workers(waits, whole, now), MOST_WORKERS), now + 1)
    left = max(preparing_seconds(waits, whole, now) / workers - (whole - waits), 0.0)
    yield Finding(
        share=waits / whole, sentence=f"{text.percent(waits / whole)} of the step waits for data",
        change=f"loading.workers={workers}", seconds=max((waits - left) / whole, 0.0),
        derived=f"{text.counted(workers, 'worker')} would prepare batches while the step runs, each on a core of its "
                "own; the wait that remains was taken off")


def _padding(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """Dimensions that leave tensor cores idle. Their share is the gain's, 0 where that is not known."""
    recipe = profile.recipe
    if TASKS[recipe.task].reads != "tokens":
        return
    rows = vocabulary(profile.predicted or step.trace)
    steps = [each for each in steps_of(profile).values() if any(has_side(op, rows) for op, _ in each.ops)]
    dims = {**({} if recipe.pad_sequence_to else {"seq_len": recipe.seq_len}), **({"vocab_size": rows} if rows else {})}
    gain = partial(padding_gain, steps[0].ops, steps[0].whole, profile.device, rows) if steps else None
    for each in misaligned(recipe, profile.device, dims, gain):
        yield Finding(
            share=each.gain or 0.0, sentence=f"{each.finding}: pad to {each.padded:,}", change=each.change,
            seconds=each.gain, derived="the gain could not be predicted" if each.gain is None else
            f"the {steps[0].name} seconds of the ops with that dimension, times the share that the time model, not "
            "calibrated, saves where it is padded")


def _launches(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """The device waits for the host to issue kernels: the step's seconds without its kernels and its data."""
    whole = profile.step_seconds
    if profile.device.kind != "cuda" or not whole or not step.busy:
        return
    share = max(whole - profile.phase_seconds.get(Phase.DATA, 0.0) - step.busy, 0.0) / whole
    compiled = profile.recipe.compiled
    even, answer = ((" even compiled", "CUDA graphs issue them together") if compiled
                    else ("", "compiled code launches fewer, and faster"))
    yield Finding(share=share, sentence=f"launch-bound{even}: the device idles {text.percent(share)} of the step while "
                  f"the host issues kernels; {answer}", seconds=share,
                  change="compile.mode=reduce-overhead" if compiled else "compile=per-block",
                  derived="the measured idle time, of which at most all goes")


def _copies(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """Ops that copy memory as it is, or cast it to another number format; fills, random draws and lookups do not."""
    shares: dict[str, float] = defaultdict(float)
    for op, times in step.ops:
        if bare_name(op.name) in COPY_OPS or op.name.startswith(COPY_KERNEL):
            shares[bare_name(op.name)] += times * (op.seconds or 0.0) / (step.whole or 1.0)
    if not shares:
        return
    worst = max(shares, key=lambda name: shares[name])
    merged = sum(share for name, share in shares.items() if name in MERGED_COPIES)
    share, compiled = sum(shares.values()), profile.recipe.compiled
    found = Finding(share=share, sentence=f"{text.percent(share)} of the step copies memory, most of it in {worst} "
                    f"({text.percent(shares[worst])})",
                    derived="compiled already" if compiled else "no field of the recipe takes these away")
    if not compiled and merged >= WORTH_SAYING:
        found = replace(found, change="compile=per-block", seconds=merged, derived=(
            "casts, copies and clones merge into neighbouring compiled kernels; at most all of their time goes"))
    yield found


def _full_precision(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """Activations and temporary memory at the peak that are float32 though the recipe computes in 16 bits."""
    recipe, (_, peak) = profile.recipe, step.peak
    sizes: dict[str, int] = defaultdict(int)
    for a in step.alive:
        if a.dtype == "float32":
            sizes[source_of(a)] += a.bytes
    if recipe.precision == "auto" or not recipe.precision.is_half or not sizes or not peak:
        return
    worst, total = max(sizes, key=lambda source: sizes[source]), sum(sizes.values())
    scores = sizes[worst] if "softmax" in worst and " in " in worst and recipe.keeps_scores else 0
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    found = Finding(share=total / peak, sentence=f"{text.size(total)} of fp32 tensors under {recipe.precision.name} at "
                    f"the peak: {worst} {text.size(sizes[worst])}{more}",
                    derived="no field of the recipe takes them away")
    pure = recipe.override(precision="bf16-pure")
    if recipe.weight_rounding is None and not pure.refusals(profile.device):  # else weights have 16 bits, or cannot
        found = replace(found, change="precision=bf16-pure", bytes=total // 2,
                        derived="the same tensors in 2 bytes instead of 4; it changes numerics")
    yield _with_less_memory(found, recipe, step, scores=scores)


def _largest(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """The largest arrays at the peak; gradients, which have a weight's shape, are none."""
    recipe, (_, peak) = profile.recipe, step.peak
    state = {a.shape for a in step.trace.allocations if a.category is Category.WEIGHTS}
    alike: dict[tuple[object, ...], list[Allocation]] = defaultdict(list)
    for a in step.alive:
        if a.shape and a.shape not in state:
            alike[a.shape, a.dtype].append(a)
    if not alike:
        return
    group = max(alike.values(), key=lambda group: (group[0].bytes, sum(a.bytes for a in group)))
    worst, together = group[0], sum(a.bytes for a in group)
    fused = "softmax" in worst.module and recipe.keeps_scores and profile.device.kind == "cuda"
    made = "stacked by a loop for the backward pass" if STACKING in worst.op else worst.op.removeprefix(FUSED_PREFIX)
    source = f"{made}, in {block_name(worst.module)}" if worst.module else made
    more = f", and {len(group) - 1} more of its shape" if len(group) > 1 else ""
    found = Finding(share=worst.bytes / peak, sentence=f"the largest array at the peak is {worst.dtype} "
                    f"{text.shape(worst.shape)}, {text.size(worst.bytes)}: {source}{more}",
                    derived="no field of the recipe makes them smaller")
    yield _with_less_memory(found, recipe, step, scores=together if fused and recipe.is_half else 0,
                            in_blocks=together if worst.module.startswith(BLOCKS_SCOPE) else 0,
                            kernel=" attention.kernel=cudnn")


def _with_less_memory(
    found: Finding, recipe: Recipe, step: ProfiledStep, *, scores: int, in_blocks: int = 0, kernel: str = ""
) -> Finding:
    """A finding about tensors, with the change that takes them away or makes them smaller; as it is where none does.

    scores: bytes of attention's scores among them; in_blocks: of those that checkpointing would not keep. kernel: to
    write beside a fused attention.
    """
    micro = recipe.micro_batch_size
    if scores:
        return replace(found, change=f"attention=sdpa{kernel}", bytes=scores,
                       derived="a fused kernel keeps no matrix of scores")
    if in_blocks and not recipe.recomputes:
        return replace(found, change="checkpointing=every-block", bytes=in_blocks,
                       derived="the backward pass computes a block's arrays again instead of keeping every block's")
    if isinstance(micro, int) and micro > 1:
        growing = sum(a.bytes for a in step.alive)
        return replace(found, change=f"micro_batch_size={micro // 2}", bytes=growing - growing * (micro // 2) // micro,
                       derived="activations and temporary memory grow in proportion to the micro-batch")
    return found


def _stacked(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """A loop over layers copies each one's activations into arrays that hold every layer's."""
    if not profile.recipe.backend.scans_layers:
        return
    share = step.share(lambda op: STACKING in op.name)
    yield Finding(
        share=share, sentence=f"{text.percent(share)} of the step stacks the activations of a loop over layers "
        f"({STACKING})", change="backend.layers=unrolled", seconds=share,
        derived="unrolled layers copy nothing into such arrays; at most all of that time goes, and the program takes "
                "longer to compile")


def _recomputed(profile: Profile, step: ProfiledStep) -> Iterator[Finding]:
    """Activations that the backward pass computes a second time."""
    share, room = step.share(lambda op: op.phase is Phase.RECOMPUTE), profile.capacity_bytes
    peak = step.trace.peak()[1]
    found = Finding(share=share, derived="it is the price of the memory that checkpointing saves", sentence=(
        f"{text.percent(share)} of the step computes activations again in the backward pass (rematted_computation)"))
    if room and peak <= ROOM_SHARE * room:
        found = replace(found, change="checkpointing=none", seconds=share, derived=(
            f"at most all of that time goes; {text.percent(1 - peak / room)} of the memory is free, and tightfit plan "
            "says whether every activation fits in it"))
    yield found


def bare_name(name: str) -> str:
    """An op's name without its library and its variant: `aten.clone.default` is `clone`."""
    return name.removeprefix("aten.").split(".")[0]


def source_of(allocation: Allocation) -> str:
    """The op and module that made a tensor: `softmax in transformer.h.*.attn`."""
    op = bare_name(allocation.op).strip("_") or "a tensor"
    return f"{op} in {block_name(allocation.module)}" if allocation.module else op


RULES = (
    Rule(_data), Rule(_padding, least=0.0),
    Rule(_launches, least=0.10, compiled=False), Rule(_copies, least=0.10, compiled=False),
    Rule(_full_precision, compiled=False),
    Rule(_largest, compiled=True), Rule(_stacked, compiled=True), Rule(_recomputed, compiled=True),
)  # fmt: skip
