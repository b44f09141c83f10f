"""A trace's allocations run through the simulated allocator: what is reserved, and whether a capacity serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tightfit.planning.allocator.blocks import Block
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.allocator.simulator import CachingAllocator, OutOfCapacity
from tightfit.trace import Place, Trace

Fits = Literal["yes", "with-retries", "no"]
"""Whether a peak fits the device: at once, only after the allocator has given cached memory back, or not."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Peaks of the allocator over a trace, and whether a capacity serves. Sizes are bytes.

    The peaks, their ticks and the curves are those of a device whose memory has no end:
    peak_allocated: the most in use at once, with the allocator's rounding and the remainders that it does not split
        off; reached at `peak_tick`.
    peak_reserved: the most that it takes from the device.
    given_back: bytes of cached memory that a step's end gives back to the device, where the settings say that it does;
        `pieces`: the segments, or pages, that they are in.
    ticks, allocated: int64 (N,), the bytes in use after every allocation and every release.

    The rest is about the capacity:
    fits: whether it serves at once, only where all cached memory is released to make room, or not at all.
    retries: ticks at which that happens, until something fails, each with the segments and pages that are released.
    failed_tick: when it first does not serve; None where it always does.
    missing: by how much it would have to grow in the course of the trace, which releases cached memory first.
    """

    peak_allocated: int
    peak_tick: int
    peak_reserved: int
    ticks: np.ndarray
    allocated: np.ndarray
    given_back: int = 0
    pieces: int = 0
    fits: Fits = "yes"
    retries: tuple[tuple[int, int], ...] = ()
    failed_tick: int | None = None
    missing: int = 0


def replay(
    trace: Trace,
    capacity: int | None = None,
    settings: AllocatorSettings | None = None,
    *,
    limit: int | None = None,
) -> Replay:
    """Run a trace's allocations in the device's memory through the allocator, on one stream.

    capacity: bytes that the device has for the allocator, its memory less the context; None for no end.
    limit: what `set_per_process_memory_fraction` allows it; None for no limit.

    The untraced memory inside the allocator is asked for in its tick and kept. Which free block it takes then decides
    what later requests find: 32 MiB cut from the block of the logits cost as much again as the logits.

    Events of one tick: first releases, then births, both in the order of the trace's list; what dies in the tick of
    its birth is released before the next birth. Allocations of no bytes never reach the allocator.

    A trace holds the middle micro-batches of a global batch once, and they are not repeated here: all begin and end
    with the same memory in use and ask for the same in between, so that none asks for more at once. But the first
    step, which is traced with one micro-batch, gets the others of the second: how they leave the cached blocks cut is
    what the optimizer's states then find.
    """
    events, emptied = _events(trace), _emptied(trace, settings)
    free = _run(CachingAllocator(None, settings, device_memory=capacity), events, emptied)
    own = [number >= 0 for _, number, _ in events]
    ticks = np.array([tick for tick, _, _ in events], dtype=np.int64)[own]
    allocated = np.array(free.allocated, dtype=np.int64)[own]
    tight = free
    if limit is not None or (capacity is not None and capacity < free.allocator.peak_reserved):
        tight = _run(CachingAllocator(capacity, settings, limit=limit), events, emptied)
    return Replay(
        peak_allocated=free.allocator.peak_allocated,
        peak_tick=int(ticks[np.argmax(allocated)]) if events else 0,
        peak_reserved=free.allocator.peak_reserved,
        given_back=free.given_back,
        pieces=free.pieces,
        ticks=ticks,
        allocated=allocated,
        fits="no" if tight.failed_tick is not None else "with-retries" if tight.retries else "yes",
        retries=tuple(tight.retries),
        failed_tick=tight.failed_tick,
        missing=tight.missing,
    )


Event = tuple[int, int, int]
"""Tick; number of the allocation, below 0 of a micro-batch that is not the trace's own; its bytes where it is born, 0
where it is released."""


@dataclass
class _Run:
    """An allocator that has seen all events, and the bytes in use after each."""

    allocator: CachingAllocator
    allocated: list[int] = field(default_factory=list)
    retries: list[tuple[int, int]] = field(default_factory=list)
    failed_tick: int | None = None
    missing: int = 0
    given_back: int = 0
    pieces: int = 0

    def empty_cache(self) -> None:
        reserved, released = self.allocator.reserved, self.allocator.released
        self.allocator.empty_cache()
        self.given_back, self.pieces = reserved - self.allocator.reserved, self.allocator.released - released


def _emptied(trace: Trace, settings: AllocatorSettings | None) -> list[int]:
    """Ticks at which cached memory is given back: the end of every step where each does so; else of the last one, which
    stands for those that do."""
    every = None if settings is None else settings.empty_cache_steps
    ends = sorted(span.stop for span in trace.spans if span.step and span.name.startswith("step "))
    return [] if every is None else ends if every == 1 else ends[-1:]


def _events(trace: Trace) -> list[Event]:
    """Births and releases in the order that `replay` documents."""
    found = [(n, a.born, a.died, a.bytes) for n, a in enumerate(trace.allocations)
             if a.bytes and a.place is Place.DEVICE]
    found += [(len(trace.allocations) + n, untraced.born, None, untraced.bytes)
              for n, untraced in enumerate(trace.untraced) if untraced.where == "allocator" and untraced.bytes]
    ordered = [((born, 1, n, 0), (born, n, size)) for n, born, _, size in found]
    for n, born, died, _ in found:
        if died is not None:
            key = (died, 0, n, 1) if died > born else (born, 1, n, 1)
            ordered.append((key, (key[0], n, 0)))
    ordered.sort()
    return _with_whole_first_step([event for _, event in ordered], trace)


def _with_whole_first_step(events: list[Event], trace: Trace) -> list[Event]:
    """The events with the further micro-batches of the second step in the first, behind its own; where all go through a
    block before the next one, and so hold its weights together, the events as they are."""
    passes = {(name, step): sorted((s for s in trace.spans if s.name == name and s.step == step), key=lambda s: s.start)
              for name in ("forward", "backward") for step in (1, 2)}
    if len(passes["forward", 2]) < 2 or len(passes["backward", 1]) != 1:
        return events
    if passes["forward", 2][1].start < passes["backward", 2][0].start:
        return events
    start, stop = passes["forward", 2][1].start, passes["backward", 2][-1].stop
    inside = [event for event in events if start <= event[0] < stop]
    closed = {n for _, n, size in inside if size} & {n for _, n, size in inside if not size}
    behind = passes["backward", 1][0].stop
    place = next((at for at, (tick, _, _) in enumerate(events) if tick >= behind), len(events))
    return [*events[:place], *((behind, -1 - n, size) for _, n, size in inside if n in closed), *events[place:]]


def _run(allocator: CachingAllocator, events: list[Event], emptied: list[int]) -> _Run:
    """Feed the allocator; where its capacity or limit ends, note that, and raise it by what is needed to go on.
    emptied: ticks at which, once what ends there is released, it gives back what it has cached."""
    run, waiting = _Run(allocator), list(emptied)
    blocks: dict[int, Block] = {}
    retries = released = 0
    for tick, number, size in events:
        while waiting and (waiting[0] < tick or (waiting[0] == tick and size)):
            waiting.pop(0)
            run.empty_cache()
            released = allocator.released
        if not size:
            allocator.free(blocks.pop(number))
        while size and number not in blocks:
            try:
                blocks[number] = allocator.malloc(size)
            except OutOfCapacity as lack:
                run.failed_tick = tick if run.failed_tick is None else run.failed_tick
                ends = [end for end in (allocator.capacity, allocator.limit) if end is not None]
                run.missing += lack.needed - min(ends)
                if allocator.capacity is not None:
                    allocator.capacity = max(allocator.capacity, lack.needed)
                if allocator.limit is not None:
                    allocator.limit = max(allocator.limit, lack.needed)
        if allocator.retries > retries:
            if run.failed_tick in (None, tick):
                run.retries.append((tick, allocator.released - released))
            retries, released = allocator.retries, allocator.released
        run.allocated.append(allocator.allocated)
    for _ in waiting:
        run.empty_cache()
    return run
