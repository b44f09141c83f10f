"""How the micro-batches of a global batch follow one another inside a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from tightfit.techniques.base import Exactness, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Accumulation(Technique):
    slot: ClassVar[str] = "accumulation"
    trains_only: ClassVar[bool] = True
    exact: ClassVar[Exactness] = "rounding"


@technique
class Loop(Accumulation):
    """One micro-batch after the other. A framework that compiles whole steps compiles each of them again."""

    name: ClassVar[str] = "loop"
    speed: ClassVar[str] = "the baseline; where whole steps are compiled, compile time grows with the micro-batches"
    memory: ClassVar[str] = "the baseline: one micro-batch's activations, and the summed gradients"
    auto_on: ClassVar = ("pytorch",)


@technique
class Scan(Accumulation):
    """One micro-batch, compiled once, in a loop that sums the gradients."""

    name: ClassVar[str] = "scan"
    speed: ClassVar[str] = "as a loop; compile time does not grow with the micro-batches"
    memory: ClassVar[str] = "as a loop"
    auto_on: ClassVar = ("jax",)

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        return cls() if recipe.backend.compiles_whole_steps else None
