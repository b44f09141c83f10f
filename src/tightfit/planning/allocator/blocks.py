"""The pieces that a simulated allocator cuts memory into, and where it keeps the free ones. Sizes are bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Space:
    """The address space of an expandable segment, backed by memory page by page."""

    start: int
    page: int


class Block:
    """A piece of a segment, in use or free.

    requested: what was asked for, where it is in use.
    free: neither in use nor waiting for another stream to be done with it.
    mapped: backed by memory; False only inside an expandable segment.
    prev, next: its neighbours in the segment.
    """

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "requested", "size", "space")

    def __init__(self, address: int, size: int, pool: Pool, space: Space | None = None, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.space, self.mapped = address, size, pool, space, mapped
        self.requested = 0
        self.free = False
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def alone(self) -> bool:
        """Whether it is a whole segment."""
        return self.prev is None and self.next is None

    @property
    def room(self) -> int:
        """Its size, and in an expandable segment what it can grow to with the unmapped pages behind it."""
        behind = self.next
        return self.size if behind is None or behind.mapped else self.size + behind.size

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; return the rest, as the block behind."""
        rest = Block(self.address + size, self.size - size, self.pool, self.space, self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def merge(self) -> Block:
        """Grow by the free neighbours, mapped like this one, which leave their pool (try_merge_blocks)."""
        before, behind = self.prev, self.next
        if before is not None and before.free and before.mapped is self.mapped:
            self.pool.discard(before)
            self.address = before.address
            self.size += before.size
            self.prev = before.prev
            if before.prev is not None:
                before.prev.next = self
        if behind is not None and behind.free and behind.mapped is self.mapped:
            self.pool.discard(behind)
            self.size += behind.size
            self.next = behind.next
            if behind.next is not None:
                behind.next.prev = self
        return self

    def free_run(self, enough: int) -> int:
        """Bytes of this and of the free blocks right behind it, mapped or not, counted until there are `enough`."""
        total = 0
        at: Block | None = self
        while at is not None and at.free and total < enough:
            total += at.size
            at = at.next
        return total


class Pool:
    """The free blocks of one stream and kind: cached ones by size, then address; unmapped ones by address."""

    __slots__ = ("cached", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.cached: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        """Take in a block, which becomes free."""
        block.free = True
        if block.mapped:
            insort(self.cached, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def discard(self, block: Block) -> None:
        """Take out a free block. What becomes of it is the caller's to say."""
        if block.mapped:
            del self.cached[bisect_left(self.cached, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]
