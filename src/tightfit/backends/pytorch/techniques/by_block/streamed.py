"""Tensors of a model's blocks that wait in host memory, and have a place on the device while their block needs them."""

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
"""Put a block's tensors where the model or its optimizer looks for them; None for those that wait in host memory."""


class Packing:
    """The places of several tensors in one piece of memory, so that one copy moves them all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.places: list[tuple[int, int, torch.Size, torch.dtype]] = []
        self.bytes = 0
        for tensor in tensors:
            size = prod(tensor.shape) * tensor.element_size()
            self.places.append((self.bytes, size, tensor.shape, tensor.dtype))
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, uint8 of at least `bytes`."""
        return [memory[start : start + size].view(dtype).view(shape) for start, size, shape, dtype in self.places]


@dataclass(eq=False)
class _Home:
    """A block's host memory. written: the copies after which it holds what was sent last."""

    packing: Packing
    memory: Tensor
    written: list[Copy] = field(default_factory=list)


@dataclass(eq=False)
class _Slot:
    """A place on the device for one block's tensors.

    holds: the block. arriving: the copy that brings it, until it was waited for. free: what must have ended before
    another block's may be brought.
    """

    memory: Tensor
    holds: int | None = None
    arriving: Copy | None = None
    free: list[Point] = field(default_factory=list)


class Streamed:
    """One kind of the blocks' tensors, such as their weights, in host memory; two blocks' at a time are on the device.

    A block's are used between `enter` and `leave`, one block's at a time, while the next one's may be under way.
    Blocks that were never adopted are nobody's here: for them nothing happens.
    """

    def __init__(
        self, transfers: Transfers, blocks: Sequence[nn.Module], category: Category, bind: Bind, places: int = 2
    ) -> None:
        self._places = places
        self._transfers = transfers
        self._blocks = blocks
        self._category = category
        self._bind = bind
        self._homes: dict[int, _Home] = {}
        self._slots: list[_Slot] = []
        self._entered: _Slot | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._homes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(home.memory.numel() for home in self._homes.values())

    def views(self, block: int) -> list[Tensor]:
        """A block's tensors in host memory."""
        home = self._homes[block]
        return home.packing.views(home.memory)

    def move_in(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Give tensors of the host itself, which nothing has used on the device yet, their place in host memory."""
        for watch, tensor in product(watches(), tensors):
            watch.lies_on_host(tensor, pinned=False)
        self._give_home(block, tensors)
        for tensor, view in zip(tensors, self.views(block), strict=True):
            view.copy_(tensor)

    def copy_out(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Copy tensors that lie elsewhere into the block's host memory. They are kept until `wait_for_copies_out`."""
        if block not in self._homes:
            self._give_home(block, tensors)
        home = self._homes[block]
        if self._entered is not None and self._entered.holds == block:  # they lie there
            self.copy_back(block)
            return
        for slot in self._slots:
            if slot.holds == block:  # what was there before
                slot.holds = None
        pairs = zip(tensors, home.packing.views(home.memory), strict=True)
        home.written = [self._transfers.to_host(tensor.detach(), view) for tensor, view in pairs]

    def wait_for_copies_out(self, block: int) -> None:
        """What is computed from here on begins after the copies that `copy_out` began, whose sources are let go."""
        for copy in self._homes[block].written:
            copy.wait()

    def forget_copies_out(self) -> None:
        """Every copy out has been waited for: nothing later need name one."""
        for home in self._homes.values():
            home.written = []
        for slot in self._slots:
            slot.free = []

    def fetch(self, block: int | None) -> None:
        """Begin to bring a block's tensors, unless they are on the device or under way."""
        if block is None or block not in self._homes or any(slot.holds == block for slot in self._slots):
            return
        home, slot = self._homes[block], self._slot(block)
        if slot is self._entered:
            return
        before = [*slot.free, *home.written, *([slot.arriving] if slot.arriving else [])]
        target = slot.memory[: home.packing.bytes]
        slot.holds, slot.arriving = block, self._transfers.to_device(home.memory, target, before, keep=False)

    def enter(self, block: int, then: int | None = None) -> None:
        """Use a block's tensors on the device from here on, and begin to bring those of the block `then`."""
        if block in self._homes:
            self.fetch(block)
            slot = next(slot for slot in self._slots if slot.holds == block)
            if slot.arriving is not None:
                slot.arriving.wait()
                slot.arriving = None
            self._entered = slot
            self._bind(block, self._homes[block].packing.views(slot.memory))
        self.fetch(then)

    def copy_back(self, block: int) -> None:
        """The block's tensors were changed on the device: copy them into host memory."""
        if block in self._homes:
            home, slot = self._homes[block], self._entered
            assert slot is not None
            size = home.packing.bytes
            home.written = [self._transfers.to_host(slot.memory[:size], home.memory, keep=False)]

    def leave(self, block: int) -> None:
        """The block's tensors are not used any more for now."""
        slot, self._entered = self._entered, None
        if slot is not None:
            slot.free = [self._transfers.now(), *self._homes[block].written]
            self._bind(block, None)

    def drop(self) -> None:
        """Nothing on the device is worth keeping: what waits in host memory was changed there."""
        for slot in self._slots:
            slot.holds = None

    def release(self) -> None:
        """Give the places on the device back: every copy out has been waited for."""
        self._slots = []

    def forget(self) -> None:
        """Nothing that waits in host memory is worth keeping."""
        self.drop()
        self._homes.clear()

    def _give_home(self, block: int, tensors: Sequence[Tensor]) -> None:
        packing = Packing(tensors)
        like = torch.empty(packing.bytes, dtype=torch.uint8, device="meta")
        self._homes[block] = home = _Home(packing, self._transfers.host_memory(like))
        for watch in watches():
            watch.holds(home.memory, self._category, self._blocks[block])

    def _slot(self, block: int) -> _Slot:
        """A block's place on the device, always the same: what autograd saved of a block's weights in the forward pass,
        such as a transposed view, shows them again in the backward pass."""
        size = max(home.packing.bytes for home in self._homes.values())
        if not self._slots or self._slots[0].memory.numel() < size:
            assert self._entered is None, "a larger block came while another was in use"
            device = self._transfers.device
            self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(self._places)]
            for watch, slot in product(watches(), self._slots):
                watch.holds(slot.memory, self._category, None)
            self._transfers.hold_copies_in(self._transfers.now())  # which may use this memory until now
        return self._slots[block % self._places]
