"""A candidate's memory as a stacked bar: a letter and a colour for each category.

The letters alone distinguish the parts, so that a bar can be read without colours. A mark stands where the device's
memory ends; what lies beyond it is in small letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rich.text import Text

from tightfit.devices import Device
from tightfit.planning.costs import Memory
from tightfit.text import size
from tightfit.trace import CATEGORY_NAMES, Category


class Part(NamedTuple):
    """A part of the bar: its key, letter, colour and name."""

    key: str
    letter: str
    colour: str
    name: str


CACHED, CONTEXT, DATA = "cached", "context", "data"
"""Parts that are no category: what the allocator holds and no tensor uses; what lies outside the allocator; host memory
of data."""

PARTS = (
    *(Part(category, letter, colour, CATEGORY_NAMES[category]) for category, letter, colour in (
        (Category.WEIGHTS, "W", "#56b4e9"), (Category.GRADIENTS, "G", "#e69f00"), (Category.OPTIMIZER, "O", "#1fb58f"),
        (Category.ACTIVATIONS, "A", "#f0e442"), (Category.KV_CACHE, "K", "#f0a6ca"),
        (Category.TEMPORARY, "T", "#e8743b"), (Category.OTHER, "R", "#bcbcbc"),
    )),
    Part(CACHED, "C", "#9a9a9a", "cached by the allocator"),
    Part(CONTEXT, "X", "#c8b6a6", "context"),
    Part(DATA, "D", "#b3a2c7", "prefetched batches and the like"),
)
"""The colours follow Okabe and Ito's palette for colour-blind readers, bright enough for black letters on them."""

COLOURS = {part.key: part.colour for part in PARTS}

INK_STYLE = "not bold #000000 on {}"  # terminals show bold black as grey
BEYOND_STYLE = "not bold {}"
"""The style of what the device has no room for."""
FREE_MARK, END_MARK, MORE_MARK = ".", "|", ">"
WIDEST_BAR = 1.5
"""Memories that a bar is wide at most where another candidate fits; what needs more is cut off and ends in MORE_MARK.
"""


def parts_of(memory: Memory) -> dict[str, int]:
    """Bytes of each part at the peak, in the order of PARTS; they sum to `memory.used`."""
    held = {**memory.by_category, CACHED: memory.peak_reserved - memory.peak_allocated, CONTEXT: memory.context}
    return {part.key: held[part.key] for part in PARTS if held.get(part.key, 0) > 0}


def host_parts_of(memory: Memory) -> dict[str, int]:
    """Bytes of each part of the host's memory at its peak, which sum to `memory.host`; none where nothing is there."""
    kept = memory.host_by_category
    held = {**kept, DATA: memory.host - sum(kept.values())} if kept else {}
    return {part.key: held[part.key] for part in PARTS if held.get(part.key, 0) > 0}


def host_memory_of_each(device: Device) -> tuple[str, int]:
    """A heading for the host memory of a device's process, and the bytes that it has."""
    return f"host memory{' of each GPU' * (device.cards > 1)} at its peak", device.host_bytes // device.cards


def memory_bar(held: Mapping[str, int], limit: int, scale: int, width: int) -> Text:
    """The parts, what is free, and a mark where the memory ends, at `limit` bytes, all to scale: `width` cells and the
    mark stand for `scale` bytes."""
    used = sum(held.values())
    end = min(max(round(width * limit / scale), 1), width)
    if used > limit:
        end = min(end, width - 1)
        filled = max(round(width * used / scale), end + 1)
    else:
        filled = min(max(round(width * used / scale), 1), end) if held else 0
    cells = cells_of(held, filled)
    bar = Text(no_wrap=True, overflow="crop")
    for place, part in enumerate(cells[:width]):
        if place == end:
            bar.append(END_MARK)
        letter = part.letter if place < end else part.letter.lower()
        cut = place == width - 1 and len(cells) > width
        bar.append(MORE_MARK if cut else letter, style=(INK_STYLE if place < end else BEYOND_STYLE).format(part.colour))
    if used <= limit:
        bar.append(FREE_MARK * (end - filled) + END_MARK)
    return bar


def cells_of(held: Mapping[str, int], count: int) -> list[Part]:
    """The part that each of so many cells shows, to scale, but none of `held` left out: a part too small for a cell has
    one of the largest's. Where there are more parts than cells, the largest are shown."""
    largest = sorted(held, key=lambda key: -held[key])[:count]
    held = {part.key: held[part.key] for part in PARTS if part.key in largest}
    ends = [round(count * at / sum(held.values())) for at in accumulate(held.values())]
    cells = {key: stop - start for key, (start, stop) in zip(held, pairwise([0, *ends]), strict=True)}
    for key in [key for key, number in cells.items() if not number]:
        cells[max(cells, key=lambda each: cells[each])] -= 1
        cells[key] = 1
    return [part for part in PARTS for _ in range(cells.get(part.key, 0))]


def scale_of(needs: Sequence[int], limit: int) -> int:
    """Bytes that a bar's full width stands for, so that bars can be compared: the memory, or the largest need, up to
    WIDEST_BAR memories where something fits."""
    most = max([limit, *needs])
    return min(most, round(WIDEST_BAR * limit)) if min(needs, default=0) <= limit else most


def legend(memories: Sequence[Memory], device_bytes: int, width: int) -> Text:
    """The meaning of the letters and marks that the bars have, in lines of at most `width` characters."""
    present = {key for memory in memories for key in (*parts_of(memory), *host_parts_of(memory))}
    needs = [memory.used for memory in memories]
    items = [Text.assemble((p.letter, INK_STYLE.format(p.colour)), f" {p.name}") for p in PARTS if p.key in present]
    marks = [f"{FREE_MARK} free"] if min(needs, default=0) < device_bytes else []
    marks.append(f"{END_MARK} {size(device_bytes)}, end of the device's memory")
    marks += ["small letters: beyond it"] if max(needs, default=0) > device_bytes else []
    marks += [f"{MORE_MARK} cut off"] if max(needs, default=0) > scale_of(needs, device_bytes) else []
    lines: list[Text] = []
    for item in [*items, *map(Text, marks)]:
        if lines and lines[-1].cell_len + 2 + item.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", item)
        else:
            lines.append(item)
    return Text("\n").join(lines)
