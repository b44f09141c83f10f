"""The techniques by slot: the one list that recipe, backends, documentation and tests read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.techniques.accumulation import Accumulation, ByBlock, Loop, Scan
from tightfit.techniques.attention import Attention, Eager, FlashAttn, Flex, Sdpa
from tightfit.techniques.backend import Backend, Jax, Pytorch
from tightfit.techniques.base import AsIs, Base, Bf16Base, Int8, Nf4
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
)
from tightfit.techniques.compile import Compile, NoCompile, PerBlock, WholeModel
from tightfit.techniques.loading import Loading
from tightfit.techniques.loss import Chunked, Liger, Loss, Plain
from tightfit.techniques.offload import Host, NoOffload, Offload
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

SLOTS: dict[str, tuple[type[Technique], ...]] = {
    "base": (AsIs, Bf16Base, Int8, Nf4),
    "trainable": (All, Lora, Dora, Layers),
    "attention": (Eager, Sdpa, Flex, FlashAttn),
    "precision": (Fp32, Fp16, Bf16, Bf16Pure, Fp8),
    "loss": (Plain, Chunked, Liger),
    "checkpointing": (
        NoCheckpointing, EveryBlock, EveryNth, Segments, MlpOnly, AttentionOnly, Selective, MemoryBudget,
    ),
    "offload": (NoOffload, Host),
    "compile": (NoCompile, PerBlock, WholeModel),
    "optimizer": (AdamW, Sgd, Adafactor, Lion, AdamW8bit, AdamW4bit, AdamWAnyPrecision),
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
    "Offload", "Optimizer", "Parallel", "Precision", "Technique", "Trainable", "Update", "default_for_slot",
]


def default_for_slot(recipe: Recipe, device: Device, slot: str) -> Technique:
    """The technique that `auto` stands for in a slot where nothing is searched: what one of its variants calls usual,
    else the first."""
    named = (variant.default_setting(recipe, device) for variant in SLOTS[slot])
    return next((setting for setting in named if setting is not None), None) or SLOTS[slot][0]()
