"""The ladder of the notebook's transformer as it was published: in JAX, every rung one compiled program."""

from __future__ import annotations

from tightfit.ladder import published
from tightfit.ladder.rungs import Ladder, Rung

SCANNED, UNROLLED = {"name": "jax", "layers": "scanned"}, {"name": "jax", "layers": "unrolled"}
APART = {"checkpointing": {"name": "every-block", "apart": True}}


def transformer_jax() -> Ladder:
    """The notebook's seven rungs, then recipes of less memory at no more compute."""
    figures = published.TRANSFORMER
    block, one = {"checkpointing": "every-block"}, {**APART, "micro_batch_size": 64}
    lean = {**APART, "attention": {"name": "sdpa", "kernel": "cudnn"}}
    return Ladder(
        name="transformer-156m-jax", title="The notebook's transformer in JAX, 156 million parameters, 64 x 512 tokens",
        base={"model": "transformer-156m", "backend": SCANNED, "data": {"source": "dummy", "samples": 512},
              "seq_len": 512, "batch_size": 64, "micro_batch_size": 16, "precision": "bf16", "attention": "eager",
              "accumulation": "scan", "checkpointing": "none", "compile": "off",
              "optimizer": {"name": "adamw", "weight_decay": 0.0}, "max_grad_norm": 0.0,
              "lr_scheduler_type": "constant", "loading": {"workers": 0}, "learning_rate": 4e-4},
        published_on="A5000 24 GB, JAX", gpu="rtx-a5000", steps_published=1, published_memory="allocator",
        shrunk={
            "reduced": {"model_overrides": {"num_layers": 4, "hidden_size": 128, "head_dim": 32, "num_heads": 4},
                        "seq_len": 64},
            "smallest": {"model_overrides": {"num_layers": 2, "hidden_size": 64, "head_dim": 16, "num_heads": 4},
                         "seq_len": 16},
        },
        rungs=(
            Rung(name="fp32, scanned", changes={"precision": {"name": "fp32", "tf32": True}},
                 published=figures["fp32, scan"]),
            Rung(name="bf16, scanned", published=figures["bf16, scan"], against="fp32, scanned",
                 feature="mixed precision"),
            Rung(name="bf16, unrolled", changes={"backend": UNROLLED}, published=figures["bf16, no scan"],
                 against="bf16, scanned"),
            Rung(name="bf16, scanned, both parts recomputed", changes=APART, against="bf16, scanned",
                 published=figures["bf16, scan, remat MLP+Attn"], feature="gradient checkpointing"),
            Rung(name="bf16, scanned, blocks recomputed", changes=block, against="bf16, scanned",
                 published=figures["bf16, scan, remat Block"], feature="gradient checkpointing"),
            Rung(name="both parts recomputed, 1 micro-batch", changes=one, published=figures["1 minibatch"],
                 against="bf16, scanned, both parts recomputed", feature="gradient accumulation"),
            Rung(name="the same, batch 256", changes={**one, "batch_size": 256, "micro_batch_size": 256},
                 published=figures["batch 256"], against="both parts recomputed, 1 micro-batch", feature="batch size"),
            Rung(name="both parts recomputed, cuDNN attention", changes=lean, feature="SDPA",
                 against="bf16, scanned, both parts recomputed"),
            Rung(name="the same, micro-batch 8", changes={**lean, "micro_batch_size": 8},
                 against="both parts recomputed, cuDNN attention", feature="gradient accumulation"),
            Rung(name="the same, micro-batch 8, unrolled", against="the same, micro-batch 8",
                 changes={**lean, "micro_batch_size": 8, "backend": UNROLLED}),
        ),
        notes=("products of fp32 run as tf32, as JAX has them where it is not told otherwise",),
    )  # fmt: skip
