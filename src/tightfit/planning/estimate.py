"""One candidate's cost, read off its trace: memory through the allocator, time through the time model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device
from tightfit.planning.allocator.replay import Replay
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.costs import Estimate, FitRank, Memory, Time
from tightfit.planning.timing.step_time import StepTime
from tightfit.planning.timing.uncertainty import speed_error
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.text import counted, percent, seconds, size
from tightfit.trace import MODEL_STATES, Category, Place, Span, Trace, UntracedMemory

IN_BLOCK = re.compile(r"(^|\.)\d+(\.|$)")
"""Pattern in the names of modules that lie in a list of blocks, such as `model.layers.3`."""
SEGMENT_SECONDS = 1e-3
"""Seconds to give a segment back to the device and to take it again: assumed, as cudaMalloc was seen to take half a
millisecond to 1.2 for 1 to 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Memory that is to stay free: of a device a share of all of it and a fixed number of bytes, and a share of the
    host's.

    It covers what no trace shows: the predictions' own error, other processes, a display.
    """

    share: float = 0.03
    fixed: int = 256 << 20
    host: float = 0.04

    def of(self, device: Device) -> int:
        return round(self.share * device.memory_bytes) + self.fixed


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The functions that planning is done with.

    predict: a resolved recipe's trace on a device. Raises Refused or ModelError for what cannot be built.
    replay: a trace through the device's allocator, of so many bytes or without end, as its settings have it.
    step_time: the time of the trace's last step.
    mfu: model FLOPs utilization, as a share, of a step that takes so many seconds; 0 where the peak is not known.
    untraced: what a trace that was made from another recipe's or device's does not show.
    model_size: size of the model that a recipe names; raises ModelError.
    margin: what is to stay free.
    """

    predict: Callable[[Recipe, Device], Trace]
    replay: Callable[[Trace, int | None, AllocatorSettings], Replay]
    step_time: Callable[[Trace, Recipe, Device], StepTime]
    mfu: Callable[[Recipe, Device, float], float]
    untraced: Callable[[Recipe, Device, Trace], list[UntracedMemory]]
    model_size: Callable[[Recipe], ModelSize]
    margin: Margin = Margin()


def without_times(tools: Tools) -> Tools:
    """The tools where memory alone is asked about: times, and the FLOPs of each length of sequences, take as long as
    the rest."""
    def model_size(recipe: Recipe) -> ModelSize:
        return tools.model_size(recipe.model_copy(update={"seq_len": 1}))

    return replace(tools, step_time=lambda *_: StepTime(seconds=0.0), mfu=lambda *_: 0.0, model_size=model_size)


def capacity(trace: Trace, device: Device) -> int:
    """Bytes of the device's memory outside its context."""
    return max(device.memory_bytes - trace.untraced_bytes("context"), 0)


def predict_memory(trace: Trace, recipe: Recipe, device: Device, tools: Tools) -> Memory:
    """The memory of a resolved recipe's trace on the device and in the host, and how well it fits both."""
    settings = settings_of(recipe)
    if device.kind == "cpu":
        trace = merge_host_into_device(trace)
    room, spare = capacity(trace, device), tools.margin.of(device)
    given_back, pieces = 0, 0
    retries: Sequence[tuple[int, int]] = ()
    if device.kind == "cpu" or trace.laid_out:  # no caching allocator: reserved is allocated, and nothing is rounded
        tick, allocated = trace.peak()
        reserved = allocated = allocated + trace.untraced_bytes("allocator")
        missing = max(reserved - room, 0)
        rank = FitRank.SAFE if reserved <= room - spare else FitRank.TIGHT if reserved <= room else FitRank.NONE
    else:
        rank, replayed = FitRank.SAFE, None
        if trace.peak()[1] <= room - spare:  # else no run of the allocator need tell
            replayed = tools.replay(trace, max(room - spare, 1), settings)
        if replayed is None or replayed.fits == "no":
            replayed = tools.replay(trace, max(room, 1), settings)
            rank = FitRank.NONE if replayed.fits == "no" else FitRank.TIGHT
        tick, allocated, reserved = replayed.peak_tick, replayed.peak_allocated, replayed.peak_reserved
        given_back, pieces = replayed.given_back, replayed.pieces
        retries = replayed.retries if rank.fits else ()
        # with all that it would take without end, it fits; a tight allocator can be said to miss more
        missing = 0 if rank.fits else min(replayed.missing, max(reserved - room, 0))
    fullest, kept = trace.peak(place=Place.HOST)
    host = kept + trace.untraced_bytes("host")
    waiting = [a for a in trace.allocations if a.place is Place.HOST and a.category in MODEL_STATES]
    memory = Memory(
        device_rank=rank,
        peak_allocated=allocated,
        peak_reserved=reserved,
        context=trace.untraced_bytes("context"),
        host=host,
        by_category=by_category(trace, tick, allocated),
        peak_in=running_at(trace, tick),
        capacity=room,
        margin=spare,
        missing=missing,
        host_by_category=by_category(trace, fullest, kept, Place.HOST) if kept else {},
        host_blocks=len({a.module for a in waiting if IN_BLOCK.search(a.module)}),
        host_states_outside=sum(a.bytes for a in waiting if a.category is Category.OPTIMIZER
                                and not IN_BLOCK.search(a.module)),
        drive=trace.peak(place=Place.DRIVE)[1],
        given_back=given_back,
        pieces=pieces,
        retries=len(retries),
        taken_again=sum(released * times for (_, released), times in
                        zip(retries, trace.times_in_step(tick for tick, _ in retries), strict=True)),
        context_uncertainty=sum(figure.uncertainty for figure in trace.untraced if figure.where == "context"),
    )
    return beside_host(memory, device, tools.margin)


def beside_host(memory: Memory, device: Device, margin: Margin) -> Memory:
    """The memory as it fits the host of a device."""
    there = device.host_bytes // device.cards  # of its machine's
    spare = round(margin.host * there)
    lacking = memory.host_by_category and there  # what loading takes is the run's
    return replace(memory, host_margin=spare, host_assumed=device.host_assumed,
                   host_missing=max(memory.host - there + spare, 0) if lacking else 0)


def merge_host_into_device(trace: Trace) -> Trace:
    """The trace on a processor, whose memory is the host's: nothing in it is page-locked."""
    if not trace.lying_in(Place.HOST):
        return trace
    return replace(trace, allocations=[replace(a, place=Place.DEVICE) if a.place is Place.HOST else a
                                       for a in trace.allocations])


def steps_alone(trace: Trace) -> Trace:
    """The trace up to the end of its last step: what a few steps take, without evaluation, saving and resuming."""
    last = trace.last_step()
    return trace if last is None else until(trace, last.stop)


def until(trace: Trace, end: int) -> Trace:
    """The trace up to a tick."""
    kept = [replace(a, died=None if a.died is None or a.died >= end else a.died)
            for a in trace.allocations if a.born < end]
    return replace(trace, allocations=kept, ops=[op for op in trace.ops if op.tick < end],
                   spans=[span for span in trace.spans if span.start < end])


def by_category(trace: Trace, tick: int, total: int, place: Place = Place.DEVICE) -> dict[str, int]:
    """Bytes of a memory at a tick by what they hold, which sum to `total`: rounding, and what tracing does not see, is
    `other`."""
    held = {category.value: count for category, count in trace.by_category(tick, place).items()}
    if not held[Category.KV_CACHE.value]:  # training has none
        del held[Category.KV_CACHE.value]
    held[Category.OTHER.value] += total - sum(held.values())
    return held


def running_at(trace: Trace, tick: int) -> str:
    """The work that runs at a tick, such as `backward of a micro-batch`."""
    inside = [span for span in trace.spans if span.start <= tick < span.stop]
    if not inside:
        return "building the model"
    span = min(inside, key=lambda s: s.stop - s.start)
    names = {"forward": "forward of a micro-batch", "backward": "backward of a micro-batch", "decode": "decoding"}
    if all(other.name != "decode" for other in trace.spans):
        names["prefill"] = "forward pass"
    return names.get(span.name, span.name)


Timed = tuple[Time, Sequence[str]]
"""Time of a step, or of a batch of prompts, before the allocator takes memory again, and notes on it."""


def step_cost(trace: Trace, recipe: Recipe, device: Device, tools: Tools) -> Timed:
    """The time of a resolved recipe, from its trace, whatever the allocator's settings."""
    return (inference_time if recipe.mode == "inference" else training_time)(trace, recipe, device, tools)


def estimate(trace: Trace, recipe: Recipe, device: Device, tools: Tools, timed: Timed | None = None) -> Estimate:
    """Memory and time of a resolved recipe, from its trace. timed: its `step_cost`, where that is known."""
    time, notes = timed or step_cost(trace, recipe, device, tools)
    memory = predict_memory(trace, recipe, device, tools)
    time, emptied = _emptying(time.longer(memory.taken_again * SEGMENT_SECONDS), memory, recipe)
    return Estimate(memory=memory, time=time, untraced=tuple(trace.untraced),
                    notes=tuple(dict.fromkeys([*trace.notes, *notes, *emptied])))


def settings_of(recipe: Recipe) -> AllocatorSettings:
    """The allocator's settings in a run of a recipe."""
    trains = recipe.mode == "train"
    return AllocatorSettings(expandable_segments=recipe.expandable_segments is True,
                             empty_cache_steps=recipe.empty_cache_steps if trains else None)


def _emptying(time: Time, memory: Memory, recipe: Recipe) -> tuple[Time, list[str]]:
    """The time of a step with its share of what `empty_cache_steps` costs, and a sentence on what that gives back."""
    every = recipe.empty_cache_steps
    if every is None or not memory.given_back:
        return time, []
    longer = memory.pieces * SEGMENT_SECONDS
    slower = time.longer(longer / every)
    share = percent(1 - time.step_seconds / slower.step_seconds) if time.step_seconds else "0 %"
    return slower, [
        f"empty_cache_steps: every {counted(every, 'step')} {size(memory.given_back)} of cached memory go back to the "
        f"device, where other processes can have them; taking their {counted(memory.pieces, 'segment')} again makes "
        f"the next step about {seconds(longer)} longer (1 ms each, assumed): {share} of the time"
    ]


def training_time(trace: Trace, recipe: Recipe, device: Device, tools: Tools) -> Timed:
    """Time of a step of a resolved recipe, in every unit, and notes on it."""
    timed = tools.step_time(trace, recipe, device)
    tokens = recipe.seq_len if TASKS[recipe.task].reads == "tokens" else 0
    samples = recipe.batch_size / timed.seconds if timed.seconds > 0 else 0.0
    return Time(
        step_seconds=timed.seconds, samples_per_second=samples, tokens_per_second=samples * tokens,
        mfu=tools.mfu(recipe, device, timed.seconds), calibrated=timed.calibrated, copies=timed.copies,
        work=timed.work, communication=timed.communication, slower_host=timed.slower_host,
        error=speed_error(timed.work, device, timed.calibrated, timed.slower_host),
    ), timed.notes  # fmt: skip


def inference_time(trace: Trace, recipe: Recipe, device: Device, tools: Tools) -> Timed:
    """Time of one batch of prompts, tokenizing and copying them not counted, and notes on it. Its tokens are the
    generated ones, one for each sequence however many its beams, or those read where nothing is generated."""
    prefill, decode = (tools.step_time(stage(trace, name), recipe, device) for name in ("prefill", "decode"))
    first, rest = prefill.seconds - prefill.data, decode.seconds - decode.data  # a training global batch's data
    task = TASKS[recipe.task]
    tokens = recipe.inference.new_tokens if task.generates else recipe.seq_len if task.reads == "tokens" else 0
    samples = recipe.batch_size / (first + rest) if first + rest > 0 else 0.0
    slower = prefill.slower_host + decode.slower_host
    work = {kind: seconds + decode.work.get(kind, 0.0) for kind, seconds in prefill.work.items()}
    return Time(
        step_seconds=first + rest, samples_per_second=samples, tokens_per_second=samples * tokens, mfu=0.0,
        work=work, calibrated=prefill.calibrated, prefill_seconds=first, slower_host=slower,
        error=speed_error(work, device, prefill.calibrated, slower),
    ), [*prefill.notes, *decode.notes]  # fmt: skip


def stage(trace: Trace, name: str) -> Trace:
    """The trace with only those spans of it, `prefill` or `decode`, as its one step; none of its ops where it has no
    such span."""
    spans = [span for span in trace.spans if span.name == name]
    inside = [replace(span, step=1) for span in spans]
    whole = [Span(name="step 1", start=spans[0].start, stop=spans[-1].stop, step=1)] if spans else []
    ops = [op for op in trace.ops if any(span.start <= op.tick < span.stop for span in spans)]
    return replace(trace, ops=ops, spans=[*whole, *inside])
