"""Trainable weights of a model: all of it, low-rank additions to its linear layers, or the weights that are named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from tightfit.techniques.technique import NUMBER, Exactness, Names, Technique, at_most, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Trainable(Technique):
    slot: ClassVar[str] = "trainable"
    may_be_auto: ClassVar[bool] = False
    auto_on: ClassVar = ()
    changes_states: ClassVar[bool] = True
    share: ClassVar[float] = 1.0
    """Share of a model's parameters that is trained, as a rule of thumb."""
    adapts: ClassVar[bool] = False
    """Whether what it trains is added to the model's own weights, which all stay as they are."""

    @property
    def counted(self) -> Trainable:
        """The technique whose model FLOPs are this one's: products of tokens alone."""
        return self

    @property
    def freezes(self) -> bool:
        """Whether any weights stay as they are."""
        return self.share < 1

    def trains(self, name: str) -> bool:
        """Whether a parameter of the model's own, by its name, is trained."""
        return False

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        precision = recipe.precision
        if not self.freezes:
            return
        if precision != "auto" and precision.scales_weights:
            yield (f"precision={precision.name} scales products of weights that are trained; write "
                   "precision=bf16, or trainable=all")
        if recipe.parallel.shards:
            yield (f"parallel={recipe.parallel.name} divides gradients and states among processes, and beside "
                   "frozen weights there are few; write parallel=ddp, or trainable=all")


@technique
class All(Trainable):
    """Train every weight."""

    name: ClassVar[str] = "all"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline: gradients and optimizer states of every weight"

    def trains(self, name: str) -> bool:
        return True


@technique
class LowRank(Trainable):
    """Factors that are added to the weights of linear layers."""

    exact: ClassVar[Exactness] = "changes"
    numerics_change: ClassVar[int] = 4
    adapts: ClassVar[bool] = True
    share: ClassVar[float] = 0.01
    learns_magnitude: ClassVar[bool] = False
    """Whether the length of each output's weights is learned by itself."""

    rank: Annotated[int, Field(ge=1), at_most(2**16), NUMBER] = 16
    """Rank of what is added to a weight: its factors are (rank, in) and (out, rank)."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] = 32
    """Numerator of the factors' scale, which is alpha over rank."""
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), NUMBER] = 0.0
    """Dropout on what the factors are multiplied by."""
    rslora: bool = False
    """Scale by alpha over the square root of the rank, with which large ranks learn as well (arXiv 2312.03732)."""
    targets: Literal["all-linear"] | Names = "all-linear"
    """The linear layers that get factors: all of the model's blocks, or those of a list of names, such as `[q_proj,
    v_proj]`: whole names, or what they end with."""

    @property
    def scale(self) -> float:
        """The factor of what is added."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adds_to(self, name: str) -> bool:
        """Whether the layer of that name, one of the model's blocks or another, is among the targets' names."""
        return self.targets != "all-linear" and any(f".{name}".endswith(f".{target}") for target in self.targets)

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        if not self.targets:
            yield "targets names no layer; write trainable.targets=all-linear"


@technique
class Lora(LowRank):
    """Add the product of two small matrices to every linear layer's weight, and train those alone (Hu et al. 2021,
    arXiv 2106.09685). The model is written as an adapter that `peft` reads; `tightfit export RUN --merge` works it into
    the weights. Of a classifier, the new head is trained in full."""

    name: ClassVar[str] = "lora"
    tolerance: ClassVar[float] = 0.45
    speed: ClassVar[str] = "no gradients of weights: 4 N FLOPs a token in place of 6 N; wants a larger learning rate"
    memory: ClassVar[str] = "the weights, and about 1 % of the gradients and optimizer states"
    worth_trying: ClassVar = ({}, {"rank": 4, "dropout": 0.1, "rslora": True})


@technique
class Dora(LowRank):
    """LoRA that adds to the weights' directions, with the length of each output's weights learned beside (Liu et al.
    2024, arXiv 2402.09353)."""

    name: ClassVar[str] = "dora"
    tolerance: ClassVar[float] = 0.45
    speed: ClassVar[str] = "slower than lora: the lengths of all weights in every forward pass"
    memory: ClassVar[str] = "as lora, and one weight with its addition at a time; a second output of each layer is kept"
    learns_magnitude: ClassVar[bool] = True

    @property
    def counted(self) -> Lora:
        return Lora(rank=self.rank, targets=self.targets)


@technique
class Layers(Trainable):
    """Train the named parts in full, and nothing else."""

    name: ClassVar[str] = "layers"
    exact: ClassVar[Exactness] = "changes"
    tolerance: ClassVar[float] = 0.5
    numerics_change: ClassVar[int] = 4
    share: ClassVar[float] = 0.1
    speed: ClassVar[str] = "faster: no gradients of frozen weights, and no backward pass below the first part"
    memory: ClassVar[str] = "the weights, and the parts' gradients and optimizer states"
    worth_trying: ClassVar = ({"names": ("wte", "ln_f")},)

    names: Names = ()
    """Names of modules or weights, or what stands last or between in them: `lm_head`, `layers.31`, `self_attn`."""

    def trains(self, name: str) -> bool:
        return any(f".{part}." in f".{name}." for part in self.names)

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        if not self.names:
            yield "names no part of the model; write trainable: {name: layers, names: [lm_head]}"
