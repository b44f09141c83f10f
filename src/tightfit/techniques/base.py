"""Formats of weights that are not trained: as the others, in 16 bits, or in 8 or 4 with scales by blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from tightfit.techniques.technique import Exactness, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Base(Technique):
    slot: ClassVar[str] = "base"
    auto_on: ClassVar = ()
    changes_states: ClassVar[bool] = True
    quantizes: ClassVar[bool] = False
    """Whether the blocks' linear layers hold their weights in fewer bits than they compute in."""
    bytes_held: ClassVar[float] = 0.0
    """Bytes of a weight; 0 for what the precision says."""

    def format(self, recipe: Recipe) -> str:
        """The format of what is frozen and not quantized."""
        return "float32" if recipe.weight_rounding is None else "bfloat16"

    def weight_bytes(self, recipe: Recipe) -> float:
        """Bytes of a frozen weight."""
        return self.bytes_held or (4 if self.format(recipe) == "float32" else 2)

    def opened(self) -> Self:
        return self

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if recipe.mode == "inference":
            yield (f"generating with {self.name} weights is not planned; write base=as-is, which holds them as "
                   "the precision says")
        elif not recipe.trainable.freezes:
            yield (f"{self.name} is how frozen weights are held, and trainable=all trains every one; write "
                   "trainable=lora, or base=as-is")


@technique
class AsIs(Base):
    """Hold frozen weights as trained ones: in fp32, or in bf16 with precision=bf16-pure."""

    name: ClassVar[str] = "as-is"
    speed: ClassVar[str] = "the baseline; mixed precision casts frozen fp32 weights at every use"
    memory: ClassVar[str] = "4 bytes a frozen weight, and its 16-bit copy until its backward pass; 2 with bf16-pure"

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from ()


@technique
class _Half(Base):
    exact: ClassVar[Exactness] = "changes"
    tolerance: ClassVar[float] = 0.05
    numerics_change: ClassVar[int] = 1
    speed: ClassVar[str] = "faster than as-is: no casts of weights"
    memory: ClassVar[str] = "2 bytes a frozen weight"
    bytes_held: ClassVar[float] = 2.0
    held_in: ClassVar[str]
    """As torch names it."""

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        holds_fp32 = recipe.precision != "auto" and recipe.weight_rounding is None
        return cls() if recipe.trainable.adapts and holds_fp32 and not any(cls().refuse(recipe, device)) else None

    def format(self, recipe: Recipe) -> str:
        return self.held_in

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        precision = recipe.precision
        if precision != "auto" and precision.activations_in != self.held_in:
            yield (f"precision={precision.name} does not compute in {self.name}; write precision={self.name}, "
                   "or base=as-is, or base=int8")


@technique
class Bf16Base(_Half):
    """Hold frozen weights in bf16, whatever the trained ones are held in: what LoRA usually means."""

    name: ClassVar[str] = "bf16"
    held_in: ClassVar[str] = "bfloat16"


@technique
class Fp16Base(_Half):
    """Hold frozen weights in fp16, whatever the trained ones are held in: LoRA on a card that does not compute in
    bf16. The residual stream is in fp16 too: where it overflows, write precision=fp32 and base=as-is."""

    name: ClassVar[str] = "fp16"
    held_in: ClassVar[str] = "float16"


@technique
class _Quantized(Base):
    exact: ClassVar[Exactness] = "changes"
    quantizes: ClassVar[bool] = True

    def format(self, recipe: Recipe) -> str:
        return "float32" if recipe.precision == "auto" else recipe.precision.activations_in


@technique
class Int8(_Quantized):
    """Hold the weights of the blocks' linear layers in 8 bits, with an fp32 scale for each 256, and dequantize each in
    the forward pass and again in the backward pass. What else is frozen is held in the format of activations."""

    name: ClassVar[str] = "int8"
    tolerance: ClassVar[float] = 0.05
    numerics_change: ClassVar[int] = 2
    speed: ClassVar[str] = "slower than bf16: each weight is made twice a micro-batch, three times with checkpointing"
    memory: ClassVar[str] = "1.02 bytes a frozen weight of the blocks, and one weight in 16 bits at a time"
    bytes_held: ClassVar[float] = 1.02


@technique
class Nf4(_Quantized):
    """Hold the weights of the blocks' linear layers in 4-bit NormalFloat, with an 8-bit scale for each 64: QLoRA's base
    (Dettmers et al. 2023, arXiv 2305.14314). Dequantized as int8."""

    name: ClassVar[str] = "nf4"
    tolerance: ClassVar[float] = 0.1
    numerics_change: ClassVar[int] = 3
    speed: ClassVar[str] = "as int8"
    memory: ClassVar[str] = "0.52 bytes a frozen weight of the blocks, and one weight in 16 bits at a time"
    bytes_held: ClassVar[float] = 0.52
