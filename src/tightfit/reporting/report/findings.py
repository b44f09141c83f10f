"""What matters most in a profile: each finding with the change of the recipe that answers it, and what it would gain.

Gains are predicted, not measured, each with how it was derived. A gain in time is a share of the measured step: the
time model, which is not calibrated here, says at most what share of an op's or of idle time goes. A gain in memory is
one of what the device has. Findings are ranked by the larger of the two.

| constant | figure | why |
|---|---|---|
| `LAUNCH_WORTH`, `COPIES_WORTH` | 10 % | every step has some of both |
| `TRIED_WORKERS` | 4 | worker processes that are tried where there are fewer |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from tightfit.calibration import Ceilings
from tightfit.errors import TightfitError
from tightfit.planning.alignment import misaligned
from tightfit.planning.defaults import WORKERS
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import COMPILED_SECONDS, step_time
from tightfit.profiles import Profile
from tightfit.recipe import Recipe
from tightfit.reporting.report.breakdown import TimedOp, busy_seconds, module_name, timed_ops, whole
from tightfit.reporting.report.compiled_findings import compiled_findings
from tightfit.reporting.report.headline import predicted_step
from tightfit.reporting.report.improvement import WORTH_SAYING, Improvement
from tightfit.reporting.report.memory import step_of
from tightfit.reporting.report.wording import percent, size
from tightfit.tasks import TASKS
from tightfit.trace import Allocation, Category, Op, Phase, Trace
from tightfit.trace.sample import sampling_notes

LAUNCH_WORTH = COPIES_WORTH = 0.10
TRIED_WORKERS = 4


def findings(profile: Profile) -> list[Improvement]:
    """All findings, the one that matters most first."""
    trace = profile.measured or profile.predicted
    if trace is None:
        return []
    ops = timed_ops(trace, profile.recipe, profile.device)
    found: list[Improvement | None] = [_data(profile), *_padding(profile, trace)]
    if trace.laid_out:
        found += compiled_findings(profile, trace, ops)
    else:
        found.append(_full_precision(profile, trace))
    if not trace.laid_out and not sampling_notes(trace):  # of ops that were left out the sums say nothing
        found += [_launches(profile, ops), _copies(profile, ops)]
    return sorted((f for f in found if f is not None), key=lambda f: -f.rank)


def _data(profile: Profile) -> Improvement | None:
    """The step waits for its window, which workers could prepare meanwhile."""
    waits, step = profile.phase_seconds.get(Phase.DATA, 0.0), profile.step_seconds
    if not step or waits < WORTH_SAYING * step:
        return None
    share, written = waits / step, profile.recipe.loading.workers
    now = written if isinstance(written, int) else WORKERS[profile.device.kind]
    workers = max(TRIED_WORKERS, 2 * now)
    preparing = waits if not now else now * step  # of one window: workers that are too slow are always at it
    left = max(preparing / workers - (step - waits), 0.0)
    gain = max(share - left / step, 0.0)
    return Improvement(
        sentence=f"{percent(share)} of the step waits for data", change=f"loading.workers={workers}",
        seconds=gain, rank=gain,
        derived=f"{workers} workers prepare windows while the step runs; what they cannot hide in it was taken off",
    )


def vocabulary(trace: Trace) -> int | None:
    """Rows of the largest embedding that the trace looks anything up in."""
    rows = [op.shapes[0][0] for op in trace.ops
            if "embedding" in op.name and "backward" not in op.name and op.shapes and len(op.shapes[0]) == 2]
    return max(rows, default=None)


def _padding(profile: Profile, trace: Trace) -> Iterable[Improvement]:
    """Dimensions that leave tensor cores idle."""
    recipe, dims = profile.recipe, dict[str, int]()
    rows = vocabulary(profile.predicted or trace)
    if TASKS[recipe.task].reads == "tokens" and not recipe.pad_sequence_to:
        dims["seq_len"] = recipe.seq_len
    if rows is not None and TASKS[recipe.task].reads == "tokens":
        dims["vocab_size"] = rows
    unknown = "what it gains could not be predicted"
    gain, derived = _padding_gain(profile, rows) if rows else (None, unknown)
    for each in misaligned(recipe, profile.device, dims, gain):
        name = "vocabulary" if each.field == "vocab_size" else each.field
        change = f"pad_vocab_to={each.multiple}" if each.field == "vocab_size" else f"seq_len={each.padded}"
        yield Improvement(
            sentence=f"{name} {each.value:,} is no multiple of {each.multiple}, which tensor cores want: "
                     f"pad to {each.padded:,}",
            change=change, seconds=each.gain, rank=each.gain or 0.0,
            derived=derived if each.gain is not None else unknown,
        )


def _padding_gain(profile: Profile, rows: int) -> tuple[Callable[[Recipe], float | None], str]:
    """What a padded vocabulary saves of the step, and how that is derived: of the seconds of each op with that
    dimension the share that the time model takes off it once it is larger. The measured ops', or where none of them
    shows its shapes, as compiled ones do not, the predicted ones'."""
    recipe, device = profile.recipe, profile.device
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    measured = timed_ops(profile.measured, recipe, device)
    known = any(_has(timed.op, rows) for timed in measured)
    ops = measured if known else timed_ops(profile.predicted, recipe, device)
    step = whole(profile, ops) if known else max(busy_seconds(ops), predicted_step(profile))

    def gain(changed: Recipe) -> float | None:
        multiple = changed.pad_vocab_to
        if not multiple or not step:
            return None
        padded, saved = -(-rows // multiple) * multiple, 0.0
        try:
            for timed in ops:
                if _has(timed.op, rows):
                    now = op_seconds(timed.op, device, tf32=tf32)
                    then = op_seconds(_grown(timed.op, rows, padded), device, tf32=tf32)
                    saved += timed.in_all * (1 - then / now) if now else 0.0
        except TightfitError:
            return None
        return saved / step

    return gain, (f"the {'measured' if known else 'predicted'} seconds of the ops with that dimension, times the share "
                  "that the time model, not calibrated, saves where it is padded")


def _has(op: Op, rows: int) -> bool:
    return any(rows in shape for shape in op.shapes)


def _grown(op: Op, rows: int, padded: int) -> Op:
    def larger(work: int) -> int:
        return work * padded // rows

    shapes = tuple(tuple(padded if side == rows else side for side in shape) for shape in op.shapes)
    return replace(op, shapes=shapes, flops=larger(op.flops), bytes_read=larger(op.bytes_read),
                   bytes_written=larger(op.bytes_written))


def _launches(profile: Profile, ops: Iterable[TimedOp]) -> Improvement | None:
    """The device waits for the host to issue kernels: what the step takes beyond its kernels and its data."""
    recipe, step = profile.recipe, profile.step_seconds
    if profile.device.kind != "cuda" or not step:
        return None
    working = busy_seconds(ops)
    share = max(step - profile.phase_seconds.get(Phase.DATA, 0.0) - working, 0.0) / step
    if not working or share < LAUNCH_WORTH:
        return None
    compiled = getattr(recipe.compile, "name", "off") != "off"
    change = "compile.mode=reduce-overhead" if compiled else "compile=per-block"
    gain = None if compiled else _compiled_gain(profile, share)
    found, answer = ("launch-bound even compiled", "CUDA graphs issue them together") if compiled else (
        "launch-bound", "compile per block")
    return Improvement(
        sentence=f"{found}: the device idles {percent(share)} of the step while the host issues kernels; {answer}",
        change=change, seconds=gain, rank=share if gain is None else gain,
        derived="it was not predicted here; the idle time is the bound" if gain is None else
                "the measured idle time, times the share of such waiting that the time model, not calibrated, saves "
                "where ops are issued as fast as compiled code issues them",
    )  # fmt: skip


def _compiled_gain(profile: Profile, idle: float) -> float | None:
    """The share of the step that issuing ops as fast as compiled code would save; the idle share is the bound."""
    if profile.predicted is None:
        return None
    fast = Ceilings(device=profile.device.name, kind=profile.device.kind, processor="", torch="",
                    host=dict.fromkeys(("forward", "recompute", "backward", "optimizer"), COMPILED_SECONDS))
    try:
        now = step_time(profile.predicted, profile.recipe, profile.device)
        then = step_time(profile.predicted, profile.recipe, profile.device, fast)
    except TightfitError:
        return None
    waited = now.launch_bound_seconds
    return idle * max(1 - then.launch_bound_seconds / waited, 0.0) if waited else None


def _full_precision(profile: Profile, trace: Trace) -> Improvement | None:
    """Activations and temporaries at the peak that are float32 though the recipe computes in 16 bits."""
    name = getattr(profile.recipe.precision, "name", "")
    if name not in ("bf16", "fp16", "bf16-pure"):
        return None
    step = step_of(trace)
    tick, peak = trace.peak(step.start, step.stop)
    held: Mapping[str, list[Allocation]] = defaultdict(list)
    for a in trace.alive(tick):
        if a.dtype == "float32" and a.holds(tick) in (Category.ACTIVATIONS, Category.TEMPORARY):
            held[source_of(a)].append(a)
    sizes = {source: sum(a.bytes for a in found) for source, found in held.items()}
    total = sum(sizes.values())
    if not peak or total < WORTH_SAYING * peak:
        return None
    worst = max(sizes, key=lambda source: sizes[source])
    change, gain, derived = _narrower(profile.recipe, worst, sizes[worst], total)
    return Improvement(
        sentence=f"{size(total)} of fp32 tensors under {name} at the peak: {worst} {size(sizes[worst])}"
                 + (f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""),
        change=change, bytes=gain, derived=derived, rank=gain / (profile.capacity_bytes or peak),
    )


def source_of(allocation: Allocation) -> str:
    """What made a tensor, for reading: `softmax in transformer.h.*.attn`."""
    op = _bare(allocation.op).strip("_") or "a tensor"
    return f"{op} in {module_name(allocation.module)}" if allocation.module else op


def _narrower(recipe: Recipe, source: str, worst: int, total: int) -> tuple[str, int, str]:
    """A change that makes fp32 tensors fewer or smaller, the bytes it saves, and how that was derived."""
    if "softmax" in source and getattr(recipe.attention, "name", "") == "eager" and " in " in source:
        return "attention=sdpa", worst, "a fused kernel keeps no matrix of scores"
    micro = recipe.micro_batch_size
    if isinstance(micro, int) and micro > 1:
        return f"micro_batch_size={micro // 2}", total - total * (micro // 2) // micro, (
            "activations and temporaries grow in proportion to the micro-batch")
    return "precision=bf16-pure", total // 2, "the same tensors in 2 bytes instead of 4; it changes numerics"


def _copies(profile: Profile, ops: list[TimedOp]) -> Improvement | None:
    """Ops that copy memory as it is, or cast it to another number format. Fills, random draws and lookups, which are
    data movement too, are none."""
    moving = [timed for timed in ops if _bare(timed.op.name) in COPIES or timed.op.name.startswith(KERNEL)]
    taken, step = busy_seconds(moving), whole(profile, ops)
    if not step or taken < COPIES_WORTH * step:
        return None
    by_name: dict[str, float] = defaultdict(float)
    for timed in moving:
        by_name[_bare(timed.op.name)] += timed.in_all
    worst = max(by_name, key=lambda name: by_name[name])
    sentence = f"{percent(taken / step)} of the step copies memory"
    sentence += f", most of it in {worst} ({percent(by_name[worst] / step)})"
    compiled = getattr(profile.recipe.compile, "name", "off") != "off"
    merged = sum(seconds for name, seconds in by_name.items() if name in MERGED) / step
    if compiled or merged < WORTH_SAYING:
        return Improvement(sentence=sentence, change="", rank=taken / step / 2,  # half: there is nothing to write
                       derived="compiled already" if compiled else "no field of the recipe takes these away")
    return Improvement(
        sentence=sentence, change="compile=per-block", seconds=merged, rank=merged,
        derived="casts, copies and clones merge into the compiled kernels beside them; at most all of their time goes",
    )


def _bare(name: str) -> str:
    """An op's name without its library and its variant: `aten.clone.default` is `clone`."""
    return name.removeprefix("aten.").split(".")[0]


MERGED = ("_to_copy", "copy_", "clone", "contiguous", "cat")
"""Copies that a compiler merges into their neighbours."""
COPIES = frozenset({
    *MERGED, "copy", "stack", "_chunk_cat", "repeat", "roll", "flip", "constant_pad_nd", "split_with_sizes_copy",
    "narrow_copy", "as_strided_copy", "permute_copy", "transpose_copy", "_foreach_copy_", "_pin_memory",
})  # fmt: skip
KERNEL = "Memcpy"
"""How CUDA's own copies are called, which no op is known for."""
