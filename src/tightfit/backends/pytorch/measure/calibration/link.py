"""Measures the copies between the host's memory and a GPU's: what `calibration.LinkRates` keeps.

Copies are made as a step with offloading makes them, by `Transfers`, from and to memory of the same kind. What runs
beside the measured work begins before it and ends after it, so that a figure holds while all of it is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.techniques.by_block.transfers import StreamEvent, Transfers
from tightfit.calibration import CopyRates, LinkRates
from tightfit.trace import COPIES, Stream

COPIED_BYTES = 1 << 28
"""Bytes of one copy: about those of a large model's block."""
ROUND_SECONDS, ROUNDS = 0.1, 3
"""Seconds of a round, at least one piece of work; and rounds, of which the fastest counts."""
ATTEMPTS = 5
"""Attempts, each with twice as much beside the measured work, until that outlasts it."""

Work = Callable[[], StreamEvent]
"""Begins one piece of work on its stream; its end."""


def measure_link(device: torch.device) -> LinkRates | None:
    """The copies of a CUDA device; None where its driver locks no memory of the host."""
    transfers = Transfers(device)
    locked = {stream: _copies(transfers, stream) for stream in COPIES}
    if any(host.device.type != device.type and not host.is_pinned() for host, _ in locked.values()):
        return None
    work = {stream: begin for stream, (_, begin) in locked.items()}
    ordinary = Transfers(device, pinned=False)
    pageable = {stream: _copies(ordinary, stream)[1] for stream in COPIES}
    return link_of(work, pageable, COPIED_BYTES)


def link_of(
    locked: dict[Stream, Work], pageable: dict[Stream, Work], copied: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkRates:
    """The figures from copies of `copied` bytes on both streams."""
    seconds = partial(seconds_beside, clock=clock)

    def rates(stream: Stream, other: Stream) -> CopyRates:
        mine, back = locked[stream], locked[other]
        return CopyRates(
            alone=copied / seconds(mine), both_ways=copied / seconds(mine, back),
            pageable=copied / seconds(pageable[stream]),
        )  # fmt: skip

    return LinkRates(to_device=rates(Stream.COPY_IN, Stream.COPY_OUT), to_host=rates(Stream.COPY_OUT, Stream.COPY_IN))


def seconds_beside(work: Work, beside: Work | None = None, *, clock: Callable[[], float]) -> float:
    """The least seconds of a piece of work, in a row of them, while what is `beside` it goes on."""
    once, other_once = _alone(work, clock), _alone(beside, clock) if beside is not None else 1.0
    count = max(round(ROUND_SECONDS / once), 1)
    best = float("inf")
    for _ in range(ROUNDS):
        for attempt in range(ATTEMPTS):
            room = 2 ** (attempt + 1) * count * once
            other = StreamEvent() if beside is None else _begin(beside, round(room / other_once) + 1)
            began = clock()
            _wait(_begin(work, count))
            taken = clock() - began
            outlasted = other.event is None or not other.event.query()  # a processor ends each before the next
            _wait(other)
            if outlasted:
                break
        best = min(best, taken / count)
    return best


def _alone(work: Work, clock: Callable[[], float]) -> float:
    """Seconds of one piece of work, after a first one."""
    _wait(work())
    began = clock()
    _wait(work())
    return max(clock() - began, 1e-6)


def _begin(work: Work, count: int) -> StreamEvent:
    """Begin so many pieces of work. The end of the last."""
    for _ in range(count - 1):
        work()
    return work()


def _wait(end: StreamEvent) -> None:
    if end.event is not None:
        end.event.synchronize()


def _copies(transfers: Transfers, stream: Stream) -> tuple[Tensor, Work]:
    """Host memory, and copies from or to it."""
    there = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=transfers.device)
    host = transfers.host_memory(there.nbytes).zero_()
    copy: Any = transfers.to_host if stream is Stream.COPY_OUT else transfers.to_device
    ends = (there, host) if stream is Stream.COPY_OUT else (host, there)
    return host, lambda: copy(*ends, after=(), keep=False)
