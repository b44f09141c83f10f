"""Copies between a device's memory and the host's, while the device computes: how offloaded tensors move.

    transfers = Transfers(device)                 # once; its two side streams live as long as it does
    copy = transfers.to_host(tensor, buffer)      # begins when what was computed so far is there
    copy.wait()                                   # what is computed from here on finds the copy made

On CUDA copies run on side streams, in order, one stream for each direction, to and from page-locked memory. A tensor
that is copied is kept until its copy was waited for, so that its memory is not handed out again before. On a processor
a copy is made at once. A `TransferWatch` among the dispatch modes hears of each: on fake tensors that stand for a
GPU's, this alone distinguishes the host's memory from the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tightfit.backends.pytorch.techniques.by_block.host_allocator import HostAllocator
from tightfit.system import pinned_size
from tightfit.trace import COPIES, PAGEABLE, Category, Phase, Stream

TO_HOST, TO_DEVICE, WAIT = "tightfit.to_host", "tightfit.to_device", "tightfit.wait"
COPY_NAMES = {Stream.COPY_OUT: TO_HOST, Stream.COPY_IN: TO_DEVICE}


class TransferWatch:
    """A dispatch mode that follows memory by its place, and ops by their stream: here the one that sees nothing.
    Moments are ticks of its own; None is one that it has not seen."""

    def lies_on_host(self, tensor: Tensor, *, pinned: bool, taken: int | None = None) -> None:
        """A tensor's memory is the host's, from its birth on. taken: bytes that it takes of it, where they are not its
        own."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is page-locked memory of the host, as far as it has seen."""
        return True

    def holds(self, tensor: Tensor, category: Category, module: nn.Module | None) -> None:
        """A tensor's memory is of that category, and of a module of the model; None for no one's."""

    def working_on(self, module: nn.Module, phase: Phase | None = None) -> AbstractContextManager[None]:
        """Context of work on a module's tensors outside of its calls, of a phase or of the one at hand."""
        return nullcontext()

    def region(self, name: str, args: Sequence[object] = ()) -> AbstractContextManager[None]:
        """Context of a region that runs as one, such as a compiled graph on its arguments: what is done in it bears its
        name."""
        return nullcontext()

    def copying(self, name: str, stream: Stream, after: Sequence[int]) -> AbstractContextManager[None]:
        """Context of a copy of that name on that stream, which begins after those moments."""
        return nullcontext()

    def last(self, stream: Stream) -> int | None:
        """The moment of the stream's last op."""
        return None

    def waits(self, stream: Stream, moment: int) -> None:
        """The stream's next op begins after that moment; the host waits at once."""


def active_watch() -> TransferWatch:
    """The dispatch mode that watches; where none does, the watch that sees nothing."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, TransferWatch)), TransferWatch())


class StreamEvent:
    """A moment on a stream that others can wait for: the end of what it was asked to do so far.

    event: CUDA's. tick: that of who watches.
    """

    def __init__(self, event: torch.cuda.Event | None = None, tick: int | None = None) -> None:
        self.event = event
        self.tick = tick


class Copy(StreamEvent):
    """A copy that was begun. target: where it goes; to be read after `wait` or `wait_on_host`."""

    def __init__(self, transfers: Transfers, target: Tensor, stream: Stream) -> None:
        super().__init__()
        self.target, self.stream = target, stream
        self._transfers = transfers

    def wait(self) -> Tensor:
        """Later computation begins after the copy. The target."""
        if self.event is not None:
            torch.cuda.current_stream(self._transfers.device).wait_event(self.event)
        return self._waited_for(Stream.COMPUTE)

    def wait_on_host(self) -> Tensor:
        """The host waits until the copy is made. The target."""
        if self.event is not None:
            self.event.synchronize()
        return self._waited_for(Stream.HOST)

    def _waited_for(self, stream: Stream) -> Tensor:
        self._transfers.finish(self)
        if self.tick is not None:
            active_watch().waits(stream, self.tick)
        return self.target


class Transfers:
    """The copies of one device. pinned: whether host memory is to be page-locked; by default on CUDA."""

    def __init__(self, device: torch.device, *, pinned: bool | None = None) -> None:
        self.device = device
        self.pinned = device.type == "cuda" if pinned is None else pinned
        self._host = HostAllocator(device, locked=self.pinned)
        self._streams = {s: torch.cuda.Stream(device) for s in COPIES} if device.type == "cuda" else {}
        self._begun: dict[Copy, Tensor] = {}
        self.latest_out: Copy | None = None
        """The copy to the host begun last: whoever waits for it waits for all before."""
        self._hold_in: tuple[StreamEvent, ...] = ()

    def host_memory(self, count: int) -> Tensor:
        """Memory of the host that lasts: `count` bytes without values, uint8, (count,)."""
        made = self._host.persistent(count)
        active_watch().lies_on_host(made, pinned=self._host.locked)
        return made

    def _temporary_memory(self, like: Tensor) -> Tensor:
        """Memory of the host that is given back soon, for a tensor of the same shape, strides and dtype."""
        made, pinned = self._host.temporary(like), self._host.locked
        active_watch().lies_on_host(made, pinned=pinned, taken=pinned_size(made.nbytes) if pinned else None)
        return made

    def record_event(self) -> StreamEvent:
        """The end of what was computed so far."""
        event = torch.cuda.current_stream(self.device).record_event() if self._streams else None
        return StreamEvent(event, active_watch().last(Stream.COMPUTE))

    def to_host(self, source: Tensor, target: Tensor | None = None, after: Sequence[StreamEvent] | None = None, *,
                keep: bool = True) -> Copy:
        """Copy a tensor of the device into host memory, `target` or new memory.

        after: what the copy waits for, such as another that writes the source; by default all that was computed so
            far. Whoever names less sees to it that the source is written and the target is free by then.
        keep: hold on to the source until the copy is waited for. Whoever does not sees to it that it outlives it.
        """
        target = self._temporary_memory(source) if target is None else target
        return self._copy(Stream.COPY_OUT, source, target, [self.record_event()] if after is None else after, keep)

    def to_device(self, source: Tensor, target: Tensor | None = None, after: Sequence[StreamEvent] | None = None, *,
                  keep: bool = True) -> Copy:
        """Copy a tensor of the host into the device's memory, `target` or new memory; `after` and `keep` as in
        `to_host`. New memory may have been used until now, so that its copy waits for what was computed so far in any
        case."""
        fresh = target is None
        if target is None:
            target = torch.empty_like(source, device=self.device, pin_memory=False, requires_grad=False)
        if fresh or after is None:  # behind what fills new memory, too, as PyTorch's deterministic mode does
            after = [*(after or ()), self.record_event()]
        return self._copy(Stream.COPY_IN, source, target, after, keep)

    def wait_for_copies_out(self) -> None:
        """Let later computation wait for every copy into host memory begun so far."""
        if self.latest_out is not None:
            self.latest_out.wait()
        self.hold_copies_in()

    def wait_on_host(self) -> None:
        """Let the host wait for every copy begun so far: what it writes then, none of them reads."""
        if self.latest_out is not None:
            self.latest_out.wait_on_host()
        if self._streams:
            self._streams[Stream.COPY_IN].synchronize()
        self.hold_copies_in()

    def hold_copies_in(self) -> None:
        """The next copy to the device, and so all behind it, begin after what was computed so far."""
        self._hold_in = (self.record_event(),)

    def finish(self, copy: Copy) -> None:
        """A copy is waited for: its source is let go."""
        self._begun.pop(copy, None)

    def _copy(self, stream: Stream, source: Tensor, target: Tensor, after: Sequence[StreamEvent], keep: bool) -> Copy:
        assert (target.shape, target.dtype) == (source.shape, source.dtype), "a target is as its source"
        if stream is Stream.COPY_IN:
            after, self._hold_in = [*after, *self._hold_in], ()
        copy = Copy(self, target, stream)
        if keep:
            self._begun[copy] = source
        host = target if stream is Stream.COPY_OUT else source
        locked = self._locked(host)
        name = COPY_NAMES[stream] + ("" if locked else PAGEABLE)
        ticks = [point.tick for point in after if point.tick is not None]
        watch = active_watch()
        with torch.no_grad(), watch.copying(name, stream, ticks):
            self._run(copy, source, after)
        watch.lies_on_host(host, pinned=self.pinned and locked)  # it may not have seen it made
        copy.tick = watch.last(stream)
        if stream is Stream.COPY_OUT:
            self.latest_out = copy
        return copy

    def _run(self, copy: Copy, source: Tensor, after: Sequence[StreamEvent]) -> None:
        """Begin a copy on its stream; without streams, make it."""
        if not self._streams:
            copy.target.copy_(source)
            return
        stream = self._streams[copy.stream]
        for point in after:
            if point.event is not None:
                stream.wait_event(point.event)
        with torch.cuda.stream(stream):
            copy.target.copy_(source, non_blocking=True)
        copy.event = stream.record_event()

    def _locked(self, host: Tensor) -> bool:
        """Whether host memory is page-locked, or need not be."""
        if self.device.type == "cuda":
            return host.is_pinned()
        return not self.pinned or active_watch().is_pinned(host)
