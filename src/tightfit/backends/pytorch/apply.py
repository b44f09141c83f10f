"""Application of each technique in PyTorch: one explicit table, and what is absent with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from tightfit.backends.base import unchanged
from tightfit.backends.pytorch import techniques
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques import accumulation, loading, precision, update
from tightfit.backends.pytorch.techniques.attention import apply as attention
from tightfit.backends.pytorch.techniques.optimizer import apply as optimizer
from tightfit.techniques import Technique
from tightfit.techniques import accumulation as accumulations
from tightfit.techniques import attention as attentions
from tightfit.techniques import base as bases
from tightfit.techniques import checkpointing as checkpointings
from tightfit.techniques import compile as compiles
from tightfit.techniques import loading as loadings
from tightfit.techniques import loss as losses
from tightfit.techniques import offload as offloads
from tightfit.techniques import optimizer as optimizers
from tightfit.techniques import parallel as parallels
from tightfit.techniques import precision as precisions
from tightfit.techniques import trainable as trainables
from tightfit.techniques import update as updates


def later(module: str, name: str) -> Callable[[Any, Build], Build]:
    """A function of one of the modules of `techniques/` that most runs do without, imported as it is called."""
    def applied(technique: Technique, build: Build) -> Build:
        apply: Callable[[Any, Build], Build] = getattr(import_module(f"{techniques.__name__}.{module}"), name)
        return apply(technique, build)

    return applied


APPLY: Mapping[type[Technique], Callable[[Any, Build], Build]] = {
    bases.AsIs: unchanged,
    bases.Bf16Base: later("adapters.apply", "apply_base"),
    bases.Int8: later("adapters.apply", "apply_base"),
    bases.Nf4: later("adapters.apply", "apply_base"),
    trainables.All: unchanged,
    trainables.Lora: later("adapters.apply", "low_rank"),
    trainables.Dora: later("adapters.apply", "low_rank"),
    trainables.Layers: later("adapters.apply", "layers"),
    attentions.Eager: attention.eager,
    attentions.Sdpa: attention.sdpa,
    attentions.Flex: attention.flex,
    attentions.FlashAttn: attention.flash_attn,
    precisions.Fp32: precision.fp32,
    precisions.Fp16: precision.mixed,
    precisions.Bf16: precision.mixed,
    precisions.Bf16Pure: unchanged,  # models are built in bf16; how updates round is the optimizer's part
    precisions.Fp8: precision.fp8,
    losses.Plain: unchanged,
    losses.Chunked: later("loss.apply", "chunked"),
    losses.Liger: later("loss.apply", "liger"),
    checkpointings.NoCheckpointing: unchanged,
    checkpointings.EveryBlock: later("checkpointing.apply", "every_block"),
    checkpointings.EveryNth: later("checkpointing.apply", "every_nth"),
    checkpointings.Segments: later("checkpointing.apply", "segments"),
    checkpointings.MlpOnly: later("checkpointing.apply", "mlp_only"),
    checkpointings.AttentionOnly: later("checkpointing.apply", "attention_only"),
    checkpointings.Selective: later("checkpointing.apply", "selective"),
    checkpointings.MemoryBudget: later("checkpointing.apply", "memory_budget"),
    offloads.NoOffload: unchanged,
    offloads.Host: later("offload", "host"),
    compiles.NoCompile: unchanged,
    compiles.PerBlock: later("compile", "per_block"),
    compiles.WholeModel: later("compile", "whole_model"),
    optimizers.AdamW: optimizer.adamw,
    optimizers.Sgd: optimizer.sgd,
    optimizers.Adafactor: optimizer.adafactor,
    optimizers.Lion: optimizer.lion,
    optimizers.AdamW8bit: optimizer.quantized,
    optimizers.AdamW4bit: optimizer.quantized,
    optimizers.AdamWAnyPrecision: optimizer.adamw_anyprecision,
    accumulations.Loop: accumulation.loop,
    accumulations.ByBlock: accumulation.by_block,
    updates.AfterBackward: update.after_backward,
    updates.WithForward: update.by_block,
    updates.InBackward: update.by_block,
    parallels.NoParallel: unchanged,
    parallels.Ddp: later("parallel", "ddp"),
    parallels.Fsdp: later("parallel", "fsdp"),
    parallels.Zero: later("parallel", "zero"),
    loadings.Loading: loading.loading,
}
"""Every technique of `SLOTS` that this backend has, and the function that applies it."""

ABSENT: Mapping[type[Technique], str] = {
    accumulations.Scan: "PyTorch's micro-batches run one after the other, and are not compiled as one program; write "
    "accumulation=loop, or backend=jax",
    parallels.Dp: "PyTorch's DataParallel copies the model at every step, and serves a ladder's rungs alone; write "
    "parallel=ddp, or parallel=dp with backend=jax",
}
"""Techniques that this backend does not have, with the reason."""
