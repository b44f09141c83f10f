"""The techniques by slot: the one list that recipe, backends, documentation and tests read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from tightfit.techniques.accumulation import Accumulation, ByBlock, Loop, Scan
from tightfit.techniques.attention import Attention, Eager, FlashAttn, Flex, Sdpa
from tightfit.techniques.backend import Backend, Jax, Pytorch
from tightfit.techniques.base import AsIs, Base, Bf16Base, Fp16Base, Int8, Nf4
from tightfit.techniques.checkpointing import (
    AttentionOnly,
    Checkpointing,
    EveryBlock,
    EveryNth,
    MemoryBudget,
    MlpOnly,
    NoCheckpointing,
    Segments,
    Selective,
    TiledMlp,
)
from tightfit.techniques.compile import Compile, NoCompile, PerBlock, WholeModel
from tightfit.techniques.loading import Loading
from tightfit.techniques.loss import Chunked, Liger, Loss, Plain
from tightfit.techniques.muon import Muon
from tightfit.techniques.offload import Host, HostShares, NoOffload, Offload
from tightfit.techniques.optimizer import (
    Adafactor,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWAnyPrecision,
    Lion,
    Optimizer,
    Sgd,
)
from tightfit.techniques.parallel import Ddp, Dp, Fsdp, NoParallel, Parallel, Zero
from tightfit.techniques.precision import Bf16, Bf16Pure, Fp8, Fp16, Fp32, Precision
from tightfit.techniques.technique import Technique
from tightfit.techniques.trainable import All, Dora, Layers, Lora, Trainable
from tightfit.techniques.update import AfterBackward, InBackward, Update, WithForward

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe
    from tightfit.techniques.precision import Rounding

SLOTS: dict[str, tuple[type[Technique], ...]] = {
    "base": (AsIs, Bf16Base, Fp16Base, Int8, Nf4),
    "trainable": (All, Lora, Dora, Layers),
    "attention": (Eager, Sdpa, Flex, FlashAttn),
    "precision": (Fp32, Fp16, Bf16, Bf16Pure, Fp8),
    "loss": (Plain, Chunked, Liger),
    "checkpointing": (
        NoCheckpointing, EveryBlock, EveryNth, Segments, TiledMlp, MlpOnly, AttentionOnly, Selective, MemoryBudget,
    ),
    "offload": (NoOffload, Host),
    "compile": (NoCompile, PerBlock, WholeModel),
    "optimizer": (AdamW, Sgd, Adafactor, Lion, Muon, AdamW8bit, AdamW4bit, AdamWAnyPrecision),
    "accumulation": (Loop, ByBlock, Scan),
    "update": (AfterBackward, WithForward, InBackward),
    "parallel": (NoParallel, Dp, Ddp, Fsdp, Zero),
    "loading": (Loading,),
}
"""Every technique, by the recipe field it fills, in the order in which a backend applies them."""

VARIANTS: dict[str, tuple[type[Technique], ...]] = {**SLOTS, "backend": (Pytorch, Jax)}
"""Every recipe field that names a variant with knobs: the slots, and the backend that applies them."""

__all__ = [
    "SLOTS", "VARIANTS", "Accumulation", "Attention", "Backend", "Base", "Checkpointing", "Compile", "Loading", "Loss",
    "Offload", "Optimizer", "Parallel", "Precision", "Technique", "TechniqueFacts", "Trainable", "Update",
    "default_for_slot",
]


def default_for_slot(recipe: Recipe, device: Device, slot: str) -> Technique:
    """The technique that `auto` stands for in a slot where nothing is searched: what one of its variants calls usual,
    else the first."""
    named = (variant.default_setting(recipe, device) for variant in SLOTS[slot])
    return next((setting for setting in named if setting is not None), None) or SLOTS[slot][0]()


def is_searched(slot: str) -> bool:
    """Whether a search decides a slot that says `auto`, on some backend; where none does, it follows the others."""
    return any(variant.auto_on for variant in VARIANTS[slot])


class TechniqueFacts:
    """Facts of the techniques that a recipe names; of a choice that is still `auto` none is known: each is false."""

    if TYPE_CHECKING:
        base: Base | Literal["auto"]
        attention: Attention | Literal["auto"]
        precision: Precision | Literal["auto"]
        checkpointing: Checkpointing | Literal["auto"]
        offload: Offload | Literal["auto"]
        compile: Compile | Literal["auto"]

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of weights, gradients and optimizer states on the device for each of the model's parameters, as the
        techniques declare them."""
        recipe = cast("Recipe", self)
        named = [technique for slot in SLOTS if (technique := getattr(recipe, slot)) != "auto"]
        learned: float = sum(technique.bytes_per_parameter(recipe) for technique in named)
        frozen = self.frozen_base.weight_bytes(recipe) * (1 - self.offloaded.weights)
        return recipe.trainable.share * learned + (1 - recipe.trainable.share) * frozen

    @property
    def resolved_micro_batch(self) -> int:
        """Samples of a micro-batch of a recipe that leaves it open no longer."""
        micro = cast("Recipe", self).micro_batch_size
        assert micro != "auto", "resolve the recipe first"
        return micro

    @property
    def keeps_scores(self) -> bool:
        """Whether its attention keeps every layer's matrix of scores."""
        return self.attention != "auto" and self.attention.keeps_scores

    @property
    def tf32(self) -> bool:
        """Whether its matrix products of fp32 tensors may use the tensor cores."""
        return self.precision != "auto" and self.precision.tf32

    @property
    def is_half(self) -> bool:
        """Whether its matrix products are known to take numbers of 16 bits or fewer."""
        return self.precision != "auto" and self.precision.is_half

    @property
    def weight_rounding(self) -> Rounding | None:
        """Rounding of updates of bf16 weights; None where weights are fp32."""
        return None if self.precision == "auto" else self.precision.weight_rounding

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again in the backward pass."""
        return self.checkpointing != "auto" and self.checkpointing.recomputes

    @property
    def compiled(self) -> bool:
        """Whether it names a compiler."""
        return self.compile != "auto" and self.compile.compiles

    @property
    def frozen_base(self) -> Base:
        """The format of weights that are not trained; as-is while that is open."""
        return AsIs() if self.base == "auto" else self.base

    @property
    def offloaded(self) -> HostShares:
        """The shares of the model that wait in the host's memory."""
        return HostShares() if self.offload == "auto" else self.offload.shares

    @property
    def one_region(self) -> bool:
        """Whether a compiler takes the whole model as one."""
        return self.compile != "auto" and self.compile.one_region
