"""A plan in a notebook: one HTML table with a memory bar for each candidate, and the answers below. No scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from tightfit.planning.plan import Memory, Plan
from tightfit.planning.wording import size
from tightfit.reporting.plan.memory_bar import PARTS, Part, parts_of, scale_of
from tightfit.reporting.plan.words import answers, columns, heading, marks

LEFT, RIGHT = "text-align:left", "text-align:right"
BAR = "display:inline-block;height:1em"


def plan_html(plan: Plan) -> str:
    """The plan as an HTML fragment, styled by itself alone; text takes the page's colours, light or dark."""
    choices, costs = columns(plan)
    both = [*choices, *costs]
    total = plan.device.memory_bytes
    memories = [candidate.estimate.memory for candidate in plan.candidates]
    scale = scale_of(memories, total)
    heads = ["#", *(column.heading for column in both), "memory at the peak"]
    rows = []
    for rank, candidate in enumerate(plan.candidates, start=1):
        weight = ";font-weight:bold" if candidate is plan.chosen else ""
        star = "*" if candidate.changes_numerics else ""
        cells = [_cell(f"{rank}{star}", RIGHT + weight)]
        cells += [_cell(escape(c.text(candidate)), (RIGHT if c.right else LEFT) + weight) for c in both]
        cells.append(_cell(_bar(candidate.estimate.memory, total, scale), LEFT + ";white-space:nowrap"))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th style="{LEFT}">{escape(text)}</th>' for text in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    notes = [plan.device.notes, marks(plan.candidates)]
    paragraphs = [f'<p style="{LEFT}"><b>{escape(heading(plan))}</b></p>', table, _legend(memories)] if rows else [
        f"<p><b>{escape(heading(plan))}</b></p>"]
    paragraphs += [f"<p>{escape(note)}</p>" for note in notes if note]
    told = "".join(f'<tr>{_cell(f"<b>{escape(label)}</b>", LEFT)}{_cell(escape(text), LEFT)}</tr>'
                   for label, text in answers(plan))
    return f"<div>{''.join(paragraphs)}<table><tbody>{told}</tbody></table></div>"


def _cell(content: str, style: str) -> str:
    return f'<td style="{style}">{content}</td>'


def _bar(memory: Memory, device_bytes: int, scale: int) -> str:
    """Parts as coloured spans, each with its name and size to hover over; 240 pixels stand for `scale` bytes. A line
    stands where the device's memory ends; what lies beyond it is paler, and cut off at the scale."""
    spans = [_span(title, count / scale, f"background:{part.colour}")
             for part, title, count in _pieces(memory, 0, device_bytes)]
    free = max(device_bytes - memory.used, 0)
    spans += [_span(f"free: {size(free)}", free / scale, "outline:1px dotted")] if free else []
    spans.append(f'<span title="the device\'s end: {size(device_bytes)}" '
                 f'style="{BAR};width:2px;background:currentColor"></span>')
    spans += [_span(title, count / scale, f"background:{part.colour};opacity:0.5")
              for part, title, count in _pieces(memory, device_bytes, scale)]
    return "".join(spans) + ("&gt;" if memory.used > scale else "")


def _pieces(memory: Memory, start: int, stop: int) -> Iterator[tuple[Part, str, int]]:
    """What of each part lies between two bytes of the stack, with the part's name and whole size."""
    held, at = parts_of(memory), 0
    for part in PARTS:
        count = held.get(part.key, 0)
        inside = min(at + count, stop) - max(at, start)
        at += count
        if inside > 0:
            yield part, f"{part.name}: {size(count)}", inside


def _span(title: str, share: float, style: str) -> str:
    return f'<span title="{escape(title)}" style="{BAR};width:{240 * share:.1f}px;{style}"></span>'


def _legend(memories: Iterable[Memory]) -> str:
    present = {key for memory in memories for key in parts_of(memory)}
    items = [f'<span style="{BAR};width:1em;background:{part.colour}"></span> {escape(part.name)}'
             for part in PARTS if part.key in present]
    return f"<p>{' &nbsp; '.join(items)}</p>"
