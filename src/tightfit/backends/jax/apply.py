"""The table of techniques in JAX: the function that applies each, or the reason why it is absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tightfit import techniques
from tightfit.backends.base import unchanged
from tightfit.backends.jax import accumulation, attention, checkpointing, optimizer, precision
from tightfit.backends.jax.build import Build
from tightfit.techniques import Technique

APPLY: Mapping[type[Technique], Callable[[Any, Build], Build]] = {
    **dict.fromkeys((
        techniques.base.AsIs, techniques.trainable.All, techniques.loss.Plain, techniques.offload.NoOffload,
        techniques.compile.NoCompile, techniques.update.AfterBackward, techniques.parallel.NoParallel,
        techniques.parallel.Dp, techniques.loading.Loading,
    ), unchanged),
    techniques.attention.Eager: attention.eager,
    techniques.attention.Sdpa: attention.sdpa,
    techniques.precision.Fp32: precision.fp32,
    techniques.precision.Bf16: precision.bf16,
    **dict.fromkeys((
        techniques.checkpointing.NoCheckpointing, techniques.checkpointing.EveryBlock,
        techniques.checkpointing.EveryNth, techniques.checkpointing.Segments, techniques.checkpointing.MlpOnly,
        techniques.checkpointing.AttentionOnly, techniques.checkpointing.Selective,
    ), checkpointing.checkpointing),
    techniques.accumulation.Loop: accumulation.loop,
    techniques.accumulation.Scan: accumulation.scan,
    techniques.optimizer.AdamW: optimizer.adamw,
    techniques.optimizer.Sgd: optimizer.sgd,
    techniques.muon.Muon: optimizer.muon,
}
"""Every technique of `SLOTS` that this backend has, and the function that applies it."""

WHOLE_LOGITS = "the whole step is XLA's to fuse, and no chunks are cut for the loss; write loss=plain"
XLA_COMPILES = "XLA compiles every step whole, and torch.compile has no part in it; write compile=off"
FP32_WEIGHTS = "weights are fp32 here, and products fp32 or bf16; write precision=bf16, or backend=pytorch"
THRIFTY = ("optimizers here are those of fp32 states; write optimizer=adamw, optimizer=muon or "
           "optimizer=sgd, or backend=pytorch")

ABSENT: Mapping[type[Technique], str] = {
    **dict.fromkeys((techniques.base.Bf16Base, techniques.base.Fp16Base, techniques.base.Int8, techniques.base.Nf4),
                    "all of a step's weights are trained and have one format; write base=as-is, or backend=pytorch"),
    **dict.fromkeys((techniques.trainable.Lora, techniques.trainable.Dora, techniques.trainable.Layers),
                    "gradients are of all weights at once; write trainable=all, or backend=pytorch"),
    techniques.precision.Fp16: FP32_WEIGHTS,
    techniques.precision.Bf16Pure: FP32_WEIGHTS,
    techniques.precision.Fp8: "torchao's products and scales are PyTorch's; write precision=bf16, or backend=pytorch",
    techniques.offload.Host: "blocks are fetched by PyTorch's step; write offload=none, or backend=pytorch",
    techniques.accumulation.ByBlock: "XLA compiles all micro-batches as one program; write accumulation=scan, or "
                                     "backend=pytorch",
    **dict.fromkeys(
        (techniques.update.WithForward, techniques.update.InBackward),
        "XLA compiles a step with its update; write update=after-backward, or backend=pytorch"),
    techniques.attention.Flex: "FlexAttention is PyTorch's; write attention=sdpa",
    techniques.attention.FlashAttn: "the flash-attn library serves PyTorch; write attention=sdpa with "
                                    "attention.kernel=cudnn",
    techniques.loss.Chunked: WHOLE_LOGITS,
    techniques.loss.Liger: "Liger's kernels are PyTorch's; write loss=plain",
    techniques.checkpointing.MemoryBudget: "the budget is kept by PyTorch's compiler; write checkpointing=selective",
    techniques.checkpointing.TiledMlp: "XLA plans a block's memory as a whole; write checkpointing=every-block",
    techniques.compile.PerBlock: XLA_COMPILES,
    techniques.compile.WholeModel: XLA_COMPILES,
    **dict.fromkeys((techniques.optimizer.Adafactor, techniques.optimizer.AdamW8bit, techniques.optimizer.AdamW4bit,
                     techniques.optimizer.AdamWAnyPrecision, techniques.optimizer.Lion), THRIFTY),
    **dict.fromkeys((techniques.parallel.Ddp, techniques.parallel.Fsdp, techniques.parallel.Zero),
                    "one process serves all of a machine's devices; write parallel=dp"),
}
"""Techniques that this backend does not have, with the reason."""
