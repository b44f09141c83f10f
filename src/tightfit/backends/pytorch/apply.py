"""Application of each technique in PyTorch: one explicit table, and what is absent with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from tightfit import techniques
from tightfit.backends.base import unchanged
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques import accumulation, loading, precision, update
from tightfit.backends.pytorch.techniques.attention import apply as attention
from tightfit.backends.pytorch.techniques.optimizer import apply as optimizer
from tightfit.techniques import Technique


def later(module: str, name: str) -> Callable[[Any, Build], Build]:
    """A function of one of the modules in `techniques/` here that most runs do without, imported as it is called."""
    def applied(technique: Technique, build: Build) -> Build:
        apply: Callable[[Any, Build], Build] = getattr(import_module(f"{__package__}.techniques.{module}"), name)
        return apply(technique, build)

    return applied


APPLY: Mapping[type[Technique], Callable[[Any, Build], Build]] = {
    techniques.base.AsIs: unchanged,
    techniques.base.Bf16Base: later("adapters.apply", "apply_base"),
    techniques.base.Fp16Base: later("adapters.apply", "apply_base"),
    techniques.base.Int8: later("adapters.apply", "apply_base"),
    techniques.base.Nf4: later("adapters.apply", "apply_base"),
    techniques.trainable.All: unchanged,
    techniques.trainable.Lora: later("adapters.apply", "low_rank"),
    techniques.trainable.Dora: later("adapters.apply", "low_rank"),
    techniques.trainable.Layers: later("adapters.apply", "layers"),
    techniques.attention.Eager: attention.eager,
    techniques.attention.Sdpa: attention.sdpa,
    techniques.attention.Flex: attention.flex,
    techniques.attention.FlashAttn: attention.flash_attn,
    techniques.precision.Fp32: precision.fp32,
    techniques.precision.Fp16: precision.mixed,
    techniques.precision.Bf16: precision.mixed,
    techniques.precision.Bf16Pure: unchanged,  # models are built in bf16; how updates round is the optimizer's part
    techniques.precision.Fp8: precision.fp8,
    techniques.loss.Plain: unchanged,
    techniques.loss.Chunked: later("loss.apply", "chunked"),
    techniques.loss.Liger: later("loss.apply", "liger"),
    techniques.checkpointing.NoCheckpointing: unchanged,
    techniques.checkpointing.EveryBlock: later("checkpointing.apply", "every_block"),
    techniques.checkpointing.EveryNth: later("checkpointing.apply", "every_nth"),
    techniques.checkpointing.Segments: later("checkpointing.apply", "segments"),
    techniques.checkpointing.TiledMlp: later("checkpointing.apply", "tiled_mlp"),
    techniques.checkpointing.MlpOnly: later("checkpointing.apply", "mlp_only"),
    techniques.checkpointing.AttentionOnly: later("checkpointing.apply", "attention_only"),
    techniques.checkpointing.Selective: later("checkpointing.apply", "selective"),
    techniques.checkpointing.MemoryBudget: later("checkpointing.apply", "memory_budget"),
    techniques.offload.NoOffload: unchanged,
    techniques.offload.Host: later("offload", "host"),
    techniques.compile.NoCompile: unchanged,
    techniques.compile.PerBlock: later("compile", "per_block"),
    techniques.compile.WholeModel: later("compile", "whole_model"),
    techniques.optimizer.AdamW: optimizer.adamw,
    techniques.optimizer.Sgd: optimizer.sgd,
    techniques.optimizer.Adafactor: optimizer.adafactor,
    techniques.optimizer.Lion: optimizer.lion,
    techniques.muon.Muon: later("optimizer.muon", "muon"),
    techniques.optimizer.AdamW8bit: optimizer.quantized,
    techniques.optimizer.AdamW4bit: optimizer.quantized,
    techniques.optimizer.AdamWAnyPrecision: optimizer.adamw_anyprecision,
    techniques.accumulation.Loop: accumulation.loop,
    techniques.accumulation.ByBlock: accumulation.by_block,
    techniques.update.AfterBackward: update.after_backward,
    techniques.update.WithForward: update.by_block,
    techniques.update.InBackward: update.by_block,
    techniques.parallel.NoParallel: unchanged,
    techniques.parallel.Ddp: later("parallel", "ddp"),
    techniques.parallel.Fsdp: later("parallel", "fsdp"),
    techniques.parallel.Zero: later("parallel", "zero"),
    techniques.loading.Loading: loading.loading,
}
"""Every technique of `SLOTS` that this backend has, and the function that applies it."""

ABSENT: Mapping[type[Technique], str] = {
    techniques.accumulation.Scan: "PyTorch's micro-batches run one after the other, and are not compiled as one "
                                  "program; write accumulation=loop, or backend=jax",
    techniques.parallel.Dp: "PyTorch's DataParallel copies the model at every step, and serves a ladder's rungs alone; "
                            "write parallel=ddp, or parallel=dp with backend=jax",
}
"""Techniques that this backend does not have, with the reason."""
