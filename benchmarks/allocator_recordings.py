"""What a real allocator did, as torch records it, against what the simulated one does with the same allocations.

`torch.cuda.memory._record_memory_history` records every allocation, release and segment, `_snapshot` returns them, and
`_dump_snapshot` writes them to a file: the form is that of torch 2.11 to 2.13. The simulation must give each block the
address that it really had, and reserve as much after each allocation; that tells its error from a trace's.
"""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightfit.errors import DataError
from tightfit.planning.allocator.blocks import Block
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.allocator.simulator import CachingAllocator, OutOfCapacity

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
           "segment_unmap", "oom")
"""The actions of a snapshot that matter here; a written recording numbers them in this order."""
RESERVING = ("segment_alloc", "segment_map")
RELEASING = ("segment_free", "segment_unmap")
STATISTICS = {"peak_allocated": "allocated_bytes.all.peak", "peak_reserved": "reserved_bytes.all.peak",
              "peak_requested": "requested_bytes.all.peak", "retries": "num_alloc_retries"}
"""Figures of `CachingAllocator`, and what `torch.cuda.memory_stats` calls them."""
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError,
              zlib.error, pickle.UnpicklingError)
"""What reading a damaged file can raise."""
ADVICE = "record with torch.cuda.memory._record_memory_history(context=None), called before the first allocation"
ELSEWHERE = 1 << 60
"""Where segments lie that the record does not have."""

Event = tuple[str, int, int, int]
"""Action, address, bytes, stream."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What the allocator of one device did, from its first allocation on.

    reserved: bytes of the segments at the end.
    limit: what `set_per_process_memory_fraction` allowed; None where it was not set.
    statistics: figures that the allocator kept, by the keys of STATISTICS; empty where they were not taken.
    origin: what was recorded, and where: names and versions.
    """

    expandable: bool
    events: tuple[Event, ...]
    reserved: int
    limit: int | None = None
    statistics: Mapping[str, int] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The simulation against the record. Sizes are bytes; pairs are the real figure and the simulated one.

    moved: how many blocks the simulation put elsewhere.
    off: after how many allocations it had reserved another amount.
    first_difference: a sentence about where it first differed; None where it never did.
    reserved: at the end. peak_reserved: the most at once.
    statistics: by the keys of STATISTICS, those that the recording has.
    """

    allocations: int
    moved: int
    off: int
    first_difference: str | None
    reserved: tuple[int, int]
    peak_reserved: tuple[int, int]
    statistics: Mapping[str, tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        pairs = [self.reserved, self.peak_reserved, *self.statistics.values()]
        return self.first_difference is None and all(real == simulated for real, simulated in pairs)


def recording_of(
    snapshot: Mapping[str, Any],
    device: int = 0,
    *,
    limit: int | None = None,
    statistics: Mapping[str, int] | None = None,
    origin: Mapping[str, str] | None = None,
) -> Recording:
    """The recording in what `torch.cuda.memory._snapshot()` returns.

    statistics: what `torch.cuda.memory_stats()` returned at the same time.
    Raises DataError where it is not such a snapshot, or does not tell all from the first allocation on.
    """
    try:
        traced = snapshot["device_traces"][device]
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        pools = {tuple(s.get("segment_pool_id", (0, 0))) for s in segments}
        pools |= {tuple(e.get("pool_id", (0, 0))) for e in traced if e["action"] in ACTIONS}
        events = tuple((e["action"], int(e.get("addr", 0)), int(e["size"]), int(e["stream"]))
                       for e in traced if e["action"] in ACTIONS)
        reserved = sum(int(segment["total_size"]) for segment in segments)
        expandable = _expandable(snapshot["allocator_settings"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"snapshot: not what torch.cuda.memory._snapshot() returns: {error!r}; {ADVICE}") from None
    if pools - {(0, 0)}:
        raise DataError("snapshot: it has private pools (CUDA graphs, memory pools), which are not simulated; record "
                        "a run without them")
    counted = sum(e[2] for e in events if e[0] in RESERVING) - sum(e[2] for e in events if e[0] in RELEASING)
    if counted != reserved or not events:
        raise DataError(f"snapshot: its history adds up to {counted} reserved bytes, its segments to {reserved}: it "
                        f"does not tell all from the beginning; {ADVICE}")
    kept = {key: int(statistics[name]) for key, name in STATISTICS.items()} if statistics else {}
    return Recording(expandable=expandable, events=events, reserved=reserved, limit=limit, statistics=kept,
                     origin=dict(origin or {}))


def _expandable(values: Mapping[str, Any]) -> bool:
    """Whether a snapshot's segments are expandable. Raises DataError for a setting that is not simulated."""
    split = int(values["max_split_size"])  # the largest 64-bit number, signed or not, is no limit
    others = {"max_split_size": 0 < split < 1 << 62, "roundup_power2_divisions": any(
        int(parts) for parts in values["roundup_power2_divisions"].values()
    ), "garbage_collection_threshold": float(values["garbage_collection_threshold"]) > 0}
    if any(others.values()):
        raise DataError(f"snapshot: {', '.join(name for name, used in others.items() if used)} was set, which is not "
                        "simulated; record a run without it")
    return bool(values["expandable_segments"])


def compare(recording: Recording) -> Comparison:
    """Replay a recording's allocations and releases; compare every address and what is reserved.

    With a limit, the simulation itself decides when cached memory is released, and releases right before new memory is
    reserved are taken for the allocator's own, not for those of `torch.cuda.empty_cache()`. Without, all that is cached
    is released where the recording shows releases, since the device's free memory at that moment is not known.
    """
    places: deque[int] = deque()
    allocator = CachingAllocator(
        settings=AllocatorSettings(expandable_segments=recording.expandable), limit=recording.limit,
        address=lambda size: places.popleft() if places else ELSEWHERE + allocator.reserved,
    )
    blocks: dict[int, Block] = {}
    real = peak = allocations = moved = off = 0
    first: str | None = None
    following = [event[0] for event in recording.events[1:]] + [""]
    for number, ((action, address, size, stream), after) in enumerate(zip(recording.events, following, strict=True)):
        differs = None
        if action in RESERVING:
            places.append(address)
            real += size
            peak = max(peak, real)
        elif action in RELEASING:
            real -= size
            own = recording.limit is not None and after in (*RESERVING, "oom")
            if after not in RELEASING and not own:
                allocator.empty_cache()
        elif action == "alloc":
            allocations += 1
            block, differs = _malloc(allocator, size, stream)
            blocks[address] = block
            moved += block.address != address
            off += allocator.reserved != real
            if block.address != address:
                differs = differs or f"its block lies at {block.address:#x} instead of {address:#x}"
            elif allocator.reserved != real:
                differs = differs or f"{allocator.reserved} bytes are reserved instead of {real}"
            places.clear()
        elif action == "free_requested":
            allocator.free_requested(_known(blocks, address))
        elif action == "free_completed":
            allocator.free_completed(_known(blocks, address))
            del blocks[address]
        elif recording.limit is not None:
            try:
                allocator.free(allocator.malloc(size, stream))
                differs = "it fits, and really ran out of memory"
            except OutOfCapacity:
                places.clear()
        if differs and first is None:
            first = f"event {number}, {action} of {size} bytes: {differs}"
    statistics = {key: (value, int(getattr(allocator, key))) for key, value in recording.statistics.items()}
    if recording.limit is None:
        statistics.pop("retries", None)
    return Comparison(
        allocations=allocations, moved=moved, off=off, first_difference=first, statistics=statistics,
        reserved=(recording.reserved, allocator.reserved), peak_reserved=(peak, allocator.peak_reserved),
    )


def _malloc(allocator: CachingAllocator, size: int, stream: int) -> tuple[Block, str | None]:
    try:
        return allocator.malloc(size, stream), None
    except OutOfCapacity as lack:
        limit, allocator.limit = allocator.limit, None
        block = allocator.malloc(size, stream)
        allocator.limit = limit
        return block, f"it would need {lack.needed} bytes reserved of the {limit} allowed, and really went well"


def _known(blocks: Mapping[int, Block], address: int) -> Block:
    if address not in blocks:
        raise DataError(f"snapshot: {address:#x} is released and was never allocated; {ADVICE}")
    return blocks[address]


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, numbers and text; anything that would run code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise DataError(f"snapshot: it wants to load {module}.{name}; a snapshot holds plain values only")


def read_recording(path: Path) -> Recording:
    """Read what `write_recording` wrote (.json or .json.gz), or what `_dump_snapshot` did. Raises DataError."""
    try:
        if ".json" not in path.suffixes:
            with path.open("rb") as file:
                return recording_of(_Plain(file).load())
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        values = json.loads(text)
        columns = values["actions"], values["addresses"], values["sizes"], values["streams"]
        return Recording(
            expandable=values["settings"]["expandable_segments"],
            events=tuple((ACTIONS[action], int(address), int(size), int(stream))
                         for action, address, size, stream in zip(*columns, strict=True)),
            **{key: values[key] for key in ("reserved", "limit", "statistics", "origin")},
        )
    except UNREADABLE as error:
        raise DataError(f"{path}: no recording of the allocator: {error}") from None


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording as compressed JSON, the events in columns: action by number, address, bytes, stream."""
    actions, addresses, sizes, streams = zip(*recording.events, strict=True)
    values = {
        "settings": {"expandable_segments": recording.expandable}, "reserved": recording.reserved,
        "limit": recording.limit, "statistics": dict(recording.statistics), "origin": dict(recording.origin),
        "actions": [ACTIONS.index(action) for action in actions],
        "addresses": addresses, "sizes": sizes, "streams": streams,
    }
    path.write_bytes(gzip.compress(json.dumps(values, separators=(",", ":")).encode(), mtime=0))
