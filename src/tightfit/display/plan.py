"""A plan that prints as text, and shows as an HTML table in a notebook: a memory bar for each candidate, the answers
below, no scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

from tightfit.display.memory_bar import PARTS, parts_of, scale_of
from tightfit.display.plan_table import plan_text
from tightfit.display.words import answers, as_written, columns, heading, marks
from tightfit.planning.plan import Memory, Plan
from tightfit.text import size

PIXELS = 240
"""The width of the longest bar."""
Span = tuple[str, float, str]
"""A piece of a bar: its title, its width in pixels, and its style."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ReadablePlan(Plan):
    """A plan with its text and its table."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The same plan, readable."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(Plan)})

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        if self.chosen is None:
            return f"<Plan: {heading(self)}: nothing fits>"
        memory, time = self.chosen.estimate.memory, self.chosen.estimate.time
        return (f"<Plan: {heading(self)}: {as_written(self.chosen.recipe)}: {time.throughput:,.0f} {time.unit}, "
                f"{size(memory.used)}>")

    def _repr_html_(self) -> str:
        return plan_html(self)


def plan_html(plan: Plan) -> str:
    """The plan as an HTML fragment, styled by itself alone; text takes the page's colours, light or dark."""
    from tightfit.page import render  # the terminal needs no templates

    choices, costs = columns(plan)
    memories = [candidate.estimate.memory for candidate in plan.candidates]
    scale = scale_of(memories, plan.device.memory_bytes)
    rows = [(candidate, [column.text(candidate) for column in (*choices, *costs)],
             list(_bar(candidate.estimate.memory, plan.device.memory_bytes, scale))) for candidate in plan.candidates]
    present = {key for memory in memories for key in parts_of(memory)}
    return render(__package__ or "", "plan.html.jinja", plan=plan, heading=heading(plan), columns=[*choices, *costs],
                  rows=rows, legend=[part for part in PARTS if part.key in present], scale=scale,
                  notes=[note for note in (plan.device.notes, marks(plan.candidates)) if note], answers=answers(plan))


def _bar(memory: Memory, device_bytes: int, scale: int) -> Iterator[Span]:
    """The pieces up to the end of the device's memory, a mark, and paler the pieces beyond it, up to the scale."""
    yield from _pieces(memory, 0, device_bytes, scale, "")
    free = max(device_bytes - memory.used, 0)
    if free:
        yield f"free: {size(free)}", PIXELS * free / scale, "outline:1px dotted"
    yield f"end of the device's memory: {size(device_bytes)}", 2, "background:currentColor"
    yield from _pieces(memory, device_bytes, scale, scale, ";opacity:0.5")


def _pieces(memory: Memory, start: int, stop: int, scale: int, style: str) -> Iterator[Span]:
    """The parts between two bytes of the stack."""
    held, at = parts_of(memory), 0
    for part in PARTS:
        count = held.get(part.key, 0)
        inside = min(at + count, stop) - max(at, start)
        at += count
        if inside > 0:
            yield f"{part.name}: {size(count)}", PIXELS * inside / scale, f"background:{part.colour}{style}"
