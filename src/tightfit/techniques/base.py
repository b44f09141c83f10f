"""What every technique is: a frozen declaration that the recipe, the backends, the docs and the tests all read."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as _pydantic_dataclass

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

Exactness = Literal["bitwise", "rounding", "changes"]
"""How the technique leaves the gradients: the same bits, the same up to rounding, or changed by design."""

T = TypeVar("T")


class Technique:
    """One choice a recipe makes in one slot. Subclasses are frozen dataclasses whose fields are the knobs."""

    slot: ClassVar[str]
    """The recipe field this technique fills."""
    name: ClassVar[str]
    """What a person writes in that field."""
    exact: ClassVar[Exactness] = "bitwise"
    tolerance: ClassVar[float] = 0.0
    """For `changes`: how far above fp32 AdamW's the held-out loss may end in `benchmarks/convergence.py`, in nats."""
    speed: ClassVar[str] = ""
    """What it does to speed, in a few words, for the docs."""
    memory: ClassVar[str] = ""
    """What it does to memory, in a few words, for the docs."""

    def refuse(self, recipe: Recipe, device: Device) -> list[str]:
        """Reasons, as sentences, why this technique cannot serve `recipe` on `device`; empty if it can."""
        return []

    @classmethod
    def rungs(cls) -> list[Self]:
        """The settings worth trying: what the search, the ladder and the contract tests run over."""
        return [cls()]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def technique(cls: type[T]) -> type[T]:
    """Make a class a technique: frozen, keyword-only, validated, its knobs' docstrings kept at run time."""
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    return cast(type[T], _pydantic_dataclass(frozen=True, kw_only=True, config=config)(cls))
