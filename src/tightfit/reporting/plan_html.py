"""A plan in a notebook: one HTML table with a memory bar for each candidate, and the answers below. No scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tightfit.planning.plan import Memory, Plan
from tightfit.planning.wording import size
from tightfit.reporting.memory_bar import PARTS, parts_of, scale_of
from tightfit.reporting.plan_table import answers, columns, heading, marks
from tightfit.trace import Unseen

LEFT, RIGHT = "text-align:left", "text-align:right"
BAR = "display:inline-block;height:1em"


def plan_html(plan: Plan, unseen: Sequence[Unseen] = ()) -> str:
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
                   for label, text in answers(plan, unseen))
    return f"<div>{''.join(paragraphs)}<table><tbody>{told}</tbody></table></div>"


def _cell(content: str, style: str) -> str:
    return f'<td style="{style}">{content}</td>'


def _bar(memory: Memory, device_bytes: int, scale: int) -> str:
    """Parts as coloured spans, each with its name and size to hover over; 240 pixels stand for `scale` bytes."""
    spans = []
    for part in PARTS:
        count = parts_of(memory).get(part.key, 0)
        if count:
            width = 240 * count / max(scale, memory.used)
            spans.append(f'<span title="{escape(part.name)}: {size(count)}" '
                         f'style="{BAR};width:{width:.1f}px;background:{part.colour}"></span>')
    free = 240 * (device_bytes - memory.used) / scale
    if free > 0:
        spans.append(f'<span title="free: {size(device_bytes - memory.used)}" '
                     f'style="{BAR};width:{free:.1f}px;outline:1px dotted"></span>')
    return "".join(spans)


def _legend(memories: Iterable[Memory]) -> str:
    present = {key for memory in memories for key in parts_of(memory)}
    items = [f'<span style="{BAR};width:1em;background:{part.colour}"></span> {escape(part.name)}'
             for part in PARTS if part.key in present]
    return f"<p>{' &nbsp; '.join(items)}</p>"
