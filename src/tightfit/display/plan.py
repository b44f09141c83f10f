"""A plan that prints as text, and shows as the same table in colour in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from tightfit.display.plan_table import plan_html, plan_text
from tightfit.display.words import as_written, heading
from tightfit.planning.plan import Plan
from tightfit.text import size


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
