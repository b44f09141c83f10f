"""The table of techniques in JAX: the function that applies each, or the reason why it is absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tightfit.backends.jax import accumulation, attention, checkpointing, optimizer, precision
from tightfit.backends.jax.build import Build
from tightfit.techniques import Technique
from tightfit.techniques import accumulation as accumulations
from tightfit.techniques import attention as attentions
from tightfit.techniques import checkpointing as checkpointings
from tightfit.techniques import compile as compiles
from tightfit.techniques import loading as loadings
from tightfit.techniques import loss as losses
from tightfit.techniques import offload as offloads
from tightfit.techniques import optimizer as optimizers
from tightfit.techniques import parallel as parallels
from tightfit.techniques import precision as precisions
from tightfit.techniques import update as updates


def unchanged(technique: Technique, build: Build) -> Build:
    """The build as it is: every step does so, or reads it from the recipe."""
    return build


APPLY: Mapping[type[Technique], Callable[[Any, Build], Build]] = {
    attentions.Eager: attention.eager,
    attentions.Sdpa: attention.sdpa,
    precisions.Fp32: precision.precision,
    precisions.Fp16: precision.precision,
    precisions.Bf16: precision.precision,
    precisions.Bf16Pure: precision.precision,
    losses.Plain: unchanged,
    checkpointings.NoCheckpointing: unchanged,
    checkpointings.EveryBlock: checkpointing.checkpointing,
    checkpointings.EveryNth: checkpointing.checkpointing,
    checkpointings.Segments: checkpointing.checkpointing,
    checkpointings.MlpOnly: checkpointing.checkpointing,
    checkpointings.AttentionOnly: checkpointing.checkpointing,
    checkpointings.Selective: checkpointing.checkpointing,
    offloads.NoOffload: unchanged,
    accumulations.Loop: accumulation.loop,
    accumulations.Scan: accumulation.scan,
    compiles.NoCompile: unchanged,
    optimizers.AdamW: optimizer.adamw,
    optimizers.AdamWAnyPrecision: optimizer.adamw_anyprecision,
    optimizers.Sgd: optimizer.sgd,
    optimizers.Adafactor: optimizer.adafactor,
    optimizers.Lion: optimizer.lion,
    updates.AfterBackward: unchanged,
    parallels.NoParallel: unchanged,
    parallels.Dp: unchanged,
    loadings.Loading: unchanged,
}
"""Every technique of `SLOTS` that this backend has, and the function that applies it."""

WHOLE_LOGITS = "the whole step is XLA's to fuse, and no chunks are cut for the loss; write loss=plain"
XLA_COMPILES = "XLA compiles every step whole, and torch.compile has no part in it; write compile=off"
QUANTIZED = "optax has no states of so few bits; write optimizer=adafactor or optimizer=lion, or backend=pytorch"

ABSENT: Mapping[type[Technique], str] = {
    attentions.Flex: "FlexAttention is PyTorch's; write attention=sdpa",
    attentions.FlashAttn: "the flash-attn library serves PyTorch; write attention=sdpa with attention.kernel=cudnn",
    losses.Chunked: WHOLE_LOGITS,
    losses.Liger: "Liger's kernels are PyTorch's; write loss=plain",
    checkpointings.MemoryBudget: "the budget is kept by PyTorch's compiler; write checkpointing=selective",
    compiles.PerBlock: XLA_COMPILES,
    compiles.WholeModel: XLA_COMPILES,
    optimizers.AdamW8bit: QUANTIZED,
    optimizers.AdamW4bit: QUANTIZED,
    parallels.Ddp: "one process serves all of a machine's devices; write parallel=dp",
}
"""Techniques that this backend does not have, with the reason."""
