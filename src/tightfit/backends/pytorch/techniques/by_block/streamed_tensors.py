"""Tensors of a model's blocks and of its embeddings that wait in host memory, and come to the device while they are
used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from tightfit.backends.pytorch.techniques.by_block.transfers import Copy, Point, Transfers, watches
from tightfit.trace import Category

ALIGNMENT = 256
"""Bytes at whose multiples a packed tensor begins: what CUDA's own allocations do, and compiled kernels rely on."""

Bind = Callable[[int, "Sequence[Tensor] | None"], None]
"""Put a part's tensors where the model or its optimizer looks for them; None for those that wait in host memory."""


class Packing:
    """The places of several tensors in one piece of memory, so that one copy moves them all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.places: list[tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]] = []
        self.bytes = 0
        for tensor in tensors:
            size = prod(tensor.shape) * tensor.element_size()
            dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)  # else as contiguous, in as many bytes
            strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            self.places.append((self.bytes, size, tensor.shape, strides, tensor.dtype))
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the places are those of such tensors."""
        return [(t.shape, t.dtype) for t in tensors] == [(shape, dtype) for _, _, shape, _, dtype in self.places]

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, uint8 of at least `bytes`."""
        return [memory[start : start + size].view(dtype).as_strided(shape, strides)
                for start, size, shape, strides, dtype in self.places]


@dataclass(eq=False)
class _HostCopy:
    """A part's host memory. written: the copies after which it holds what was sent last."""

    packing: Packing
    memory: Tensor
    written: list[Copy] = field(default_factory=list)


@dataclass(eq=False)
class _DeviceBuffer:
    """A place on the device for one part's tensors.

    holds: the part. arriving: the copy that brings it, until it was waited for. free: what must have ended before
    another part's may be brought.
    """

    memory: Tensor
    holds: int | None = None
    arriving: Copy | None = None
    free: list[Point] = field(default_factory=list)


class StreamedTensors:
    """Tensors of one kind (weights, gradients or optimizer states) in host memory, double-buffered on the GPU: the next
    part's are copied while one is used.

    A part is a block of the model, or an embedding at one of its ends. A part's tensors are used between `enter` and
    `leave`, while the next one's may be under way. Parts that were never adopted are nobody's here: for them nothing
    happens.
    """

    def __init__(
        self, transfers: Transfers, parts: Sequence[nn.Module], category: Category, bind: Bind, blocks: int
    ) -> None:
        """blocks: how many of the parts, the first, are blocks. Two places are theirs, and one the others'."""
        self._transfers = transfers
        self._parts = parts
        self._category = category
        self._bind = bind
        self._blocks = blocks
        self._host_copies: dict[int, _HostCopy] = {}
        self._buffers: dict[int, _DeviceBuffer] = {}
        self._entered: dict[int, _DeviceBuffer] = {}

    def __contains__(self, part: int) -> bool:
        return part in self._host_copies

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(home.memory.numel() for home in self._host_copies.values())

    def is_entered(self, part: int) -> bool:
        """Whether the part's tensors are on the device, and bound."""
        return part in self._entered

    def views(self, part: int) -> list[Tensor]:
        """A part's tensors in host memory."""
        home = self._host_copies[part]
        return home.packing.views(home.memory)

    def move_in(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Give tensors of the host itself, which nothing has used on the device yet, their place in host memory."""
        for watch, tensor in product(watches(), tensors):
            watch.lies_on_host(tensor, pinned=False)
        self._give_home(part, tensors)
        for tensor, view in zip(tensors, self.views(part), strict=True):
            view.copy_(tensor)

    def copy_out(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into the part's host memory. They are kept until `wait_for_copies_out`."""
        if part in self._entered:  # they lie there
            self.copy_back(part)
            return
        if part not in self._host_copies or not self._host_copies[part].packing.fits(tensors):
            self._give_home(part, tensors)
        for slot in self._buffers.values():
            if slot.holds == part:  # what was there before
                slot.holds = None
        pairs = zip(tensors, self.views(part), strict=True)
        self._host_copies[part].written = [self._transfers.to_host(tensor.detach(), view) for tensor, view in pairs]

    def wait_for_copies_out(self, part: int) -> None:
        """Let later computation wait for the copies that `copy_out` began, and free their sources."""
        for copy in self._host_copies[part].written:
            copy.wait()

    def forget_copies_out(self) -> None:
        """Every copy out has been waited for: nothing later need name one."""
        for home in self._host_copies.values():
            home.written = []
        for slot in self._buffers.values():
            slot.free = []

    def fetch(self, part: int | None) -> None:
        """Begin to bring a part's tensors, unless they are on the device or under way."""
        if part is None or part not in self._host_copies:
            return
        home, slot = self._host_copies[part], self._slot(part)
        if slot.holds == part or slot in self._entered.values():
            return
        target, after = slot.memory[: home.packing.bytes], [*slot.free, *home.written]
        slot.holds, slot.arriving = part, self._transfers.to_device(home.memory, target, after, keep=False)

    def enter(self, part: int, then: int | None = None) -> None:
        """Use a part's tensors on the device from here on, and begin to bring those of the part `then`."""
        if part in self._host_copies and part not in self._entered:
            self.fetch(part)
            slot = self._slot(part)
            assert slot.holds == part, "another part's tensors are used in its place"
            if slot.arriving is not None:
                slot.arriving.wait()
                slot.arriving = None
            self._entered[part] = slot
            self._bind(part, self._host_copies[part].packing.views(slot.memory))
        self.fetch(then)

    def copy_back(self, part: int) -> None:
        """The part's tensors were changed on the device: copy them into host memory."""
        if part in self._entered:
            home, slot = self._host_copies[part], self._entered[part]
            size = home.packing.bytes
            home.written = [self._transfers.to_host(slot.memory[:size], home.memory, keep=False)]

    def leave(self, part: int) -> None:
        """The part's tensors are not used any more for now."""
        slot = self._entered.pop(part, None)
        if slot is not None:
            slot.free = [self._transfers.now(), *self._host_copies[part].written]
            self._bind(part, None)

    def drop(self) -> None:
        """Nothing on the device is worth keeping: what waits in host memory was changed there."""
        for slot in self._buffers.values():
            slot.holds = None

    def release(self, part: int | None = None) -> None:
        """Give a part's place on the device back, or all of them, but for those in use: every copy out has been waited
        for."""
        for place in list(self._buffers) if part is None else [self._place(part)]:
            slot = self._buffers.get(place)
            if slot is not None and slot not in self._entered.values():
                self._let_go(slot)
                del self._buffers[place]

    def forget(self) -> None:
        """Nothing that waits in host memory is worth keeping."""
        self.drop()
        self._host_copies.clear()

    def _give_home(self, part: int, tensors: Sequence[Tensor]) -> None:
        packing = Packing(tensors)
        self._host_copies[part] = home = _HostCopy(packing, self._transfers.host_memory(packing.bytes))
        for watch in watches():
            watch.holds(home.memory, self._category, self._parts[part])

    def _place(self, part: int) -> int:
        """A part's place on the device, always the same: what autograd saved of a block's weights in the forward pass,
        such as a transposed view, shows them again in the backward pass."""
        return part % 2 if part < self._blocks else 2

    def _slot(self, part: int) -> _DeviceBuffer:
        place = self._place(part)
        size = max(home.packing.bytes for other, home in self._host_copies.items() if self._shares_size(other, part))
        slot = self._buffers.get(place)
        if slot is None or slot.memory.numel() < size:
            if slot is not None:
                assert slot not in self._entered.values(), "a larger part came while another was in use"
                self._transfers.wait_for_copies_out()  # which may read the memory that is given back
                self._let_go(slot)
            memory = torch.empty(size, dtype=torch.uint8, device=self._transfers.device)
            slot = self._buffers[place] = _DeviceBuffer(memory)
            for watch in watches():
                watch.holds(memory, self._category, None)
            self._transfers.hold_copies_in()  # others may have used this memory until now
        return slot

    def _let_go(self, slot: _DeviceBuffer) -> None:
        """A slot's memory is about to be given back: nothing may arrive there any more."""
        if slot.arriving is not None:
            slot.arriving.wait()

    def _shares_size(self, one: int, other: int) -> bool:
        return (one < self._blocks) == (other < self._blocks)
