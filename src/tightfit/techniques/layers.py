"""How the layers of a model are laid out for a compiler: each by itself, or one in a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from tightfit.techniques.base import Exactness, Positive, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Layers(Technique):
    slot: ClassVar[str] = "layers"
    exact: ClassVar[Exactness] = "rounding"


@technique
class Unrolled(Layers):
    """Every layer stands in the program by itself, so that a compiler plans each one's memory alone."""

    name: ClassVar[str] = "unrolled"
    speed: ClassVar[str] = "the baseline; compile time grows with depth"
    memory: ClassVar[str] = "the baseline: a layer's activations are free as soon as its gradients are there"


@technique
class Scanned(Layers):
    """One layer, compiled once, in a loop over the layers' stacked weights. Without checkpointing the loop copies every
    layer's activations into arrays for all layers, which costs time and memory; with it there is little to copy."""

    name: ClassVar[str] = "scanned"
    speed: ClassVar[str] = "compile time does not grow with depth; steps are slower without checkpointing"
    memory: ClassVar[str] = "more without checkpointing; about the same with it"

    unroll: Positive = 1
    """Layers that stand side by side in one turn of the loop."""

    @classmethod
    def rungs(cls) -> list[Self]:
        return [cls(), cls(unroll=2)]

    @classmethod
    def offered(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls()] if recipe.backend == "jax" else []
