"""A slow second implementation of the caching allocator's rules, for the simulator to be compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

MIB = 1 << 20


@dataclass
class Segment:
    """A stretch of addresses: which pages are backed, and which pieces are in use."""

    start: int
    size: int
    key: tuple[int, bool]
    page: int
    mapped: set[int] = field(default_factory=set)
    used: dict[int, int] = field(default_factory=dict)

    def runs(self) -> list[tuple[int, int, bool]]:
        """Start, size and whether backed of every free piece, none of which could be larger."""
        edges = sorted({0, self.size, *self.used, *(a + s for a, s in self.used.items()),
                        *(p * self.page for p in self.mapped), *((p + 1) * self.page for p in self.mapped)})
        found: list[list] = []
        for low, high in pairwise(edges):
            if any(a <= low < a + s for a, s in self.used.items()):
                continue
            backed = low // self.page in self.mapped
            if found and found[-1][0] + found[-1][1] == low and found[-1][2] == backed:
                found[-1][1] += high - low
            else:
                found.append([low, high - low, backed])
        return [(a, s, b) for a, s, b in found]


class SlowAllocator:
    """The same rules over plain sets of pages and pieces, everything looked up anew each time. It shares no code with
    the simulator; default settings but for the kind of segments."""

    def __init__(self, capacity: int | None, expandable: bool) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.segments: list[Segment] = []
        self.end = self.retries = 0

    @property
    def reserved(self) -> int:
        return sum(len(s.mapped) * s.page for s in self.segments)

    @property
    def allocated(self) -> int:
        return sum(sum(s.used.values()) for s in self.segments)

    def malloc(self, size: int, stream: int) -> tuple[Segment, int] | None:
        size = -(-size // 512) * 512
        key = (stream, size <= MIB)
        place = self.find(key, size) or self.reserve(key, size)
        if place is None:
            self.empty_cache()
            self.retries += 1
            place = self.reserve(key, size)
        if place is None:
            return None
        segment, start, room = place
        splits = room - size >= 512 if key[1] or self.expandable else room - size > MIB
        segment.used[start] = size if splits else room
        return segment, start

    def find(self, key: tuple[int, bool], size: int) -> tuple[Segment, int, int] | None:
        fitting = []
        for segment in self.segments:
            pieces = segment.runs()
            for at, (start, room, backed) in enumerate(pieces):
                if segment.key == key and backed and room >= size:
                    behind = [r for s, r, _ in pieces[at + 1:at + 2] if s == start + room]
                    fitting.append((room, segment.start + start, room + sum(behind), segment, start))
        fitting.sort(key=lambda f: f[:2])
        while self.expandable and len(fitting) > 1 and fitting[1][2] < fitting[0][2]:
            del fitting[0]
        return (fitting[0][3], fitting[0][4], fitting[0][0]) if fitting else None

    def fits(self, more: int) -> bool:
        return self.capacity is None or self.reserved + more <= self.capacity

    def reserve(self, key: tuple[int, bool], size: int) -> tuple[Segment, int, int] | None:
        if self.expandable:
            return self.grow(key, size)
        whole = 2 * MIB if key[1] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self.fits(whole):
            return None
        self.segments.append(Segment(self.end, whole, key, whole, {0}))
        self.end += whole
        return self.segments[-1], 0, whole

    def grow(self, key: tuple[int, bool], size: int) -> tuple[Segment, int, int] | None:
        for segment in sorted(self.segments, key=lambda s: s.start):
            pieces = segment.runs() if segment.key == key else []
            for at, (_, _, backed) in enumerate(pieces):
                if backed:
                    continue
                joins = at > 0 and pieces[at - 1][2] and sum(pieces[at - 1][:2]) == pieces[at][0]
                run = [pieces[at - joins]]
                for piece in pieces[at - joins + 1:]:
                    if sum(run[-1][:2]) == piece[0]:
                        run.append(piece)
                    else:
                        break
                if sum(piece[1] for piece in run) >= size:
                    return self.fill(segment, run, size)
        page = 2 * MIB if key[1] else 20 * MIB
        memory = self.capacity or 1 << 40
        whole = -(-(memory + memory // 8) // page) * page
        self.segments.append(Segment(self.end, whole, key, page))
        self.end += whole
        return self.fill(self.segments[-1], self.segments[-1].runs(), size)

    def fill(self, segment: Segment, run: list[tuple[int, int, bool]], size: int) -> tuple[Segment, int, int] | None:
        start = run[0][0]
        have = 0
        for low, room, backed in run:
            if have >= size:
                break
            if not backed:
                pages = -(-min(room, size - have) // segment.page)
                if not self.fits(pages * segment.page):
                    return None
                segment.mapped |= {low // segment.page + n for n in range(pages)}
                have += pages * segment.page
                if pages * segment.page < room:
                    break
            else:
                have += room
        room = next(r for s, r, _ in segment.runs() if s <= start < s + r)
        return segment, start, room

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            had = bool(segment.mapped)
            for start, size, backed in segment.runs():
                if backed:
                    segment.mapped -= set(range(-(-start // segment.page), (start + size) // segment.page))
            if had and not segment.mapped:
                self.segments.remove(segment)
