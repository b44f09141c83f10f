"""Tensors of a model's blocks and of its embeddings that wait in host memory, and come to the device while they are
used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from tightfit.backends.pytorch.techniques.by_block.transfers import Copy, StreamEvent, Transfers, active_watch
from tightfit.trace import Category

ALIGNMENT = 256
"""Bytes at whose multiples a packed tensor begins: what CUDA's own allocations do, and compiled kernels rely on."""

PIECES = 8
"""Pieces in which an embedding's tensors are copied: its buffer is filled from the front with another's while it is
still copied from behind, for nothing else is computed meanwhile."""

Bind = Callable[[int, "Sequence[Tensor] | None"], None]
"""Put a part's tensors where the model or its optimizer looks for them; None for those that wait in host memory."""


class Packing:
    """The layout of several tensors in one piece of memory, so that one copy moves them all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.layouts: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = []
        self.bytes = 0
        for tensor in tensors:
            size = prod(tensor.shape) * tensor.element_size()
            dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)  # else as contiguous, in as many bytes
            strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            self.layouts.append((self.bytes, tensor.shape, strides, tensor.dtype))
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is the layout of such tensors."""
        return [(t.shape, t.dtype) for t in tensors] == [(shape, dtype) for _, shape, _, dtype in self.layouts]

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, uint8 of at least `bytes`."""
        all_as = {dtype: memory[: self.bytes].view(dtype) for dtype in {layout[-1] for layout in self.layouts}}
        first = memory.storage_offset()
        return [all_as[dtype].as_strided(shape, strides, (first + start) // dtype.itemsize)
                for start, shape, strides, dtype in self.layouts]


@dataclass(eq=False)
class _HostCopy:
    """A part's host memory. written: the copies after which it holds what was offloaded last."""

    packing: Packing
    memory: Tensor
    written: list[Copy] = field(default_factory=list)


@dataclass(eq=False)
class _DeviceBuffer:
    """Memory of the device for one part's tensors at a time.

    pieces: parts of it that are copied one by one. holds: the part. arriving: the copies that bring it, until they were
    waited for. free: what must have ended before another part is fetched. leaving: the same of each piece.
    """

    memory: Tensor
    pieces: Sequence[slice]
    holds: int | None = None
    arriving: list[Copy] = field(default_factory=list)
    free: list[StreamEvent] = field(default_factory=list)
    leaving: list[Copy] = field(default_factory=list)

    def pieces_of(self, size: int) -> list[slice]:
        """The pieces that a part of so many bytes takes."""
        return [slice(piece.start, min(piece.stop, size)) for piece in self.pieces if piece.start < size]


class StreamedTensors:
    """Tensors of one kind (weights, gradients or optimizer states) in host memory, double-buffered on the GPU: the next
    part's are copied while one is used.

    A part is a block of the model, or an embedding at one of its ends. A part's tensors are used between `fetch` and
    `release`, while the next one's may be under way. Nothing happens for parts that were neither packed nor
    offloaded.
    """

    def __init__(
        self, transfers: Transfers, parts: Sequence[nn.Module], category: Category, bind: Bind, blocks: int
    ) -> None:
        """blocks: how many of the parts, the first, are blocks. Two buffers are theirs, and one the others'."""
        self._transfers = transfers
        self._parts = parts
        self._category = category
        self._bind = bind
        self._blocks = blocks
        self._host_copies: dict[int, _HostCopy] = {}
        self._buffers: dict[int, _DeviceBuffer] = {}
        self._fetched: dict[int, _DeviceBuffer] = {}

    def __contains__(self, part: int) -> bool:
        return part in self._host_copies

    def is_fetched(self, part: int) -> bool:
        """Whether the part's tensors are on the device, and bound."""
        return part in self._fetched

    def host_views(self, part: int) -> list[Tensor]:
        """A part's tensors in host memory."""
        host_copy = self._host_copies[part]
        return host_copy.packing.views(host_copy.memory)

    def pack(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Give tensors of the host itself, which nothing has used on the device yet, the part's host memory."""
        for tensor in tensors:
            active_watch().lies_on_host(tensor, pinned=False)
        self._allocate_host_copy(part, tensors)
        for tensor, view in zip(tensors, self.host_views(part), strict=True):
            view.copy_(tensor)

    def offload(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into the part's host memory. They are kept until `wait_for_offload`."""
        if part in self._fetched:  # they lie there
            self.write_back(part)
            return
        if part not in self._host_copies or not self._host_copies[part].packing.fits(tensors):
            self._allocate_host_copy(part, tensors)
        for buffer in self._buffers.values():
            if buffer.holds == part:  # what was there before
                buffer.holds = None
        pairs = zip(tensors, self.host_views(part), strict=True)
        self._host_copies[part].written = [self._transfers.to_host(tensor.detach(), view) for tensor, view in pairs]

    def wait_for_offload(self, part: int) -> None:
        """Let later computation wait for the copies that `offload` began, and free their sources."""
        for copy in self._host_copies[part].written:
            copy.wait()

    def forget_offloads(self) -> None:
        """Every copy that `offload` or `write_back` began has been waited for: nothing later need name one."""
        for host_copy in self._host_copies.values():
            host_copy.written = []
        for buffer in self._buffers.values():
            buffer.free, buffer.leaving = [], []

    def prefetch(self, part: int | None) -> None:
        """Begin to copy a part's tensors to the device, unless they are there or under way."""
        if part is None or part not in self._host_copies:
            return
        host_copy, buffer = self._host_copies[part], self._buffer(part)
        if buffer.holds == part or buffer in self._fetched.values():
            return
        buffer.holds, after = part, [*buffer.free, *host_copy.written]
        buffer.arriving = [self._transfers.to_device(host_copy.memory[piece], buffer.memory[piece],
                                                     [*after, *buffer.leaving[number : number + 1]], keep=False)
                           for number, piece in enumerate(buffer.pieces_of(host_copy.packing.bytes))]

    def fetch(self, part: int, next_part: int | None = None) -> None:
        """Use a part's tensors on the device from here on, and prefetch those of the part `next_part`."""
        if part in self._host_copies and part not in self._fetched:
            self.prefetch(part)
            buffer = self._buffer(part)
            assert buffer.holds == part, "another part's tensors are in use in its buffer"
            self._wait_for_arrival(buffer)
            self._fetched[part] = buffer
            self._bind(part, self._host_copies[part].packing.views(buffer.memory))
        self.prefetch(next_part)

    def write_back(self, part: int) -> None:
        """The part's tensors were changed on the device: copy them into host memory."""
        if part in self._fetched:
            host_copy, buffer = self._host_copies[part], self._fetched[part]
            host_copy.written = [self._transfers.to_host(buffer.memory[piece], host_copy.memory[piece], keep=False)
                                 for piece in buffer.pieces_of(host_copy.packing.bytes)]

    def release(self, part: int) -> None:
        """The part's tensors are not used any more for now."""
        buffer = self._fetched.pop(part, None)
        if buffer is not None:
            buffer.free, buffer.leaving = [self._transfers.record_event()], self._host_copies[part].written
            self._bind(part, None)

    def invalidate(self) -> None:
        """Mark what buffers hold as out of date: what waits in host memory was changed there."""
        for buffer in self._buffers.values():
            buffer.holds = None

    def free_buffers(self, part: int | None = None) -> None:
        """Give a part's buffer back, or all of them, but for those in use: every copy from them has been waited for."""
        for number in list(self._buffers) if part is None else [self._buffer_number(part)]:
            buffer = self._buffers.get(number)
            if buffer is not None and buffer not in self._fetched.values():
                self._wait_for_arrival(buffer)
                del self._buffers[number]

    def forget(self, part: int) -> None:
        """A part has nothing that waits in host memory."""
        self.invalidate()
        del self._host_copies[part]

    def clear(self) -> None:
        """Nothing that waits in host memory is worth keeping."""
        self.invalidate()
        self._host_copies.clear()

    def _allocate_host_copy(self, part: int, tensors: Sequence[Tensor]) -> None:
        packing = Packing(tensors)
        self._host_copies[part] = host_copy = _HostCopy(packing, self._transfers.host_memory(packing.bytes))
        active_watch().holds(host_copy.memory, self._category, self._parts[part])

    def _buffer_number(self, part: int) -> int:
        """A part's buffer is always the same: what autograd saved of a block's weights in the forward pass, such as a
        transposed view, shows them again in the backward pass."""
        return part % 2 if part < self._blocks else 2

    def _buffer(self, part: int) -> _DeviceBuffer:
        number = self._buffer_number(part)
        size = max(copy.packing.bytes for other, copy in self._host_copies.items()
                   if (other < self._blocks) == (part < self._blocks))
        buffer = self._buffers.get(number)
        if buffer is None or buffer.memory.numel() < size:
            if buffer is not None:
                assert buffer not in self._fetched.values(), "a larger part came while another was in use"
                self._transfers.wait_for_copies_out()  # which may read the memory that is given back
                self._wait_for_arrival(buffer)
            memory = torch.empty(size, dtype=torch.uint8, device=self._transfers.device)
            piece = size if part < self._blocks else -(-size // (PIECES * ALIGNMENT)) * ALIGNMENT
            pieces = [slice(start, start + piece) for start in range(0, size, piece)]
            buffer = self._buffers[number] = _DeviceBuffer(memory, pieces)
            active_watch().holds(memory, self._category, None)
            self._transfers.hold_copies_in()  # others may have used this memory until now
        return buffer

    def _wait_for_arrival(self, buffer: _DeviceBuffer) -> None:
        """Let later computation wait for the copies into a buffer."""
        for copy in buffer.arriving:
            copy.wait()
        buffer.arriving = []
