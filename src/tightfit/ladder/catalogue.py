"""The ladders that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tightfit.errors import RecipeError, nearest
from tightfit.ladder import published
from tightfit.ladder.compiled import transformer_jax
from tightfit.ladder.rungs import PLAIN, SCALES, Ladder, Rung, Scale, setting_alone, setting_name
from tightfit.recipe import CHOICES
from tightfit.techniques import SLOTS
from tightfit.techniques.loading import Loading

BERT = {
    "reduced": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
                "vocab_size": 4096},
    "smallest": {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256,
                 "vocab_size": 512},
}  # fmt: skip
GPT2 = {
    "reduced": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096},
    "smallest": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512},
}
AUTO = dict.fromkeys(CHOICES, "auto")


def find_ladder(name: str) -> Ladder:
    """The ladder of that name. Raises RecipeError for an unknown one, listing them."""
    if name not in LADDERS:
        raise RecipeError(f"{name!r} is no ladder that has a name; {nearest(name, LADDERS)}")
    return LADDERS[name]()


def _shrunk(overrides: Mapping[str, Mapping[str, int]], **smaller: Mapping[Scale, Any]) -> dict[Scale, dict[str, Any]]:
    """What replaces a base's fields at the smaller scales. smaller: values of other fields by scale."""
    return {scale: {"model_overrides": dict(overrides[scale]), **{name: by[scale] for name, by in smaller.items()}}
            for scale in SCALES if scale in overrides}


def bert_large() -> Ladder:
    """One technique at a time on BERT-large, then all together."""
    one = {"micro_batch_size": 1}
    kept = {**one, "checkpointing": "every-block"}
    half = {**kept, "precision": "fp16"}
    faster = {"attention": "sdpa", "precision": "bf16"}
    first, figures = "batch 4, fp32", published.BERT_LARGE
    return Ladder(
        name="bert-large", title="BERT-large, sequence classification, 512 tokens",
        base={**PLAIN, "model": "bert-large", "task": "sequence-classification", "num_labels": 2,
              "data": {"source": "dummy", "samples": 512}, "seq_len": 512, "batch_size": 4, "micro_batch_size": 4,
              "learning_rate": 5e-5},
        published_on="V100 16 GB", gpu="v100-16gb", steps_published=128,
        shrunk=_shrunk(BERT, seq_len={"reduced": 256, "smallest": 128}),
        notes=("published with the attention of its day, every score kept: attention=eager here",),
        rungs=(
            Rung(name=first, published=figures["fp32"]),
            Rung(name="micro-batch 1, accumulation 4", changes=one, published=figures["accumulation"], against=first,
                 feature="gradient accumulation"),
            Rung(name="+ checkpointing", changes=kept, published=figures["checkpointing"],
                 against="micro-batch 1, accumulation 4", feature="gradient checkpointing"),
            Rung(name="batch 4, fp16", changes={"precision": "fp16"}, published=figures["fp16"], against=first,
                 feature="mixed precision"),
            Rung(name="accumulation, checkpointing, fp16", changes=half, published=figures["fp16 all"], against=first),
            Rung(name="batch 4, Adafactor", changes={"optimizer": "adafactor"}, published=figures["adafactor"],
                 against=first, feature="optimizer choice"),
            Rung(name="accumulation, checkpointing, fp16, Adafactor", changes={**half, "optimizer": "adafactor"},
                 published=figures["adafactor all"], against=first),
            Rung(name="batch 4, 8-bit AdamW", changes={"optimizer": "adamw-8bit"}, published=figures["8-bit"],
                 against=first, feature="optimizer choice"),
            Rung(name="accumulation, checkpointing, fp16, 8-bit AdamW", changes={**half, "optimizer": "adamw-8bit"},
                 published=figures["8-bit all"], against=first),
            Rung(name="batch 4, SDPA", changes={"attention": "sdpa"}, against=first, feature="SDPA"),
            Rung(name="batch 4, bf16, SDPA", changes=faster, against=first),
            Rung(name="batch 4, bf16, SDPA, compiled", changes={**faster, "compile": "per-block"},
                 against="batch 4, bf16, SDPA", feature="torch.compile"),
            Rung(name="pure bf16, 8-bit AdamW, SDPA, compiled", against=first,
                 changes={**faster, "precision": {"name": "bf16-pure", "rounding": "stochastic"},
                          "optimizer": "adamw-8bit", "compile": "per-block"}),
            Rung(name="what the plan chooses", changes=AUTO, against=first),
            Rung(name="what it chooses where numerics may change", changes={**AUTO, "allow_numerics": True},
                 against=first),
        ),
    )  # fmt: skip


def fp16_batch() -> Ladder:
    """fp16 against fp32 at growing batches."""
    rungs = []
    for batch in (8, 16, 32, 64):
        size = {"batch_size": batch, "micro_batch_size": batch}
        rungs += [
            Rung(name=f"batch {batch}, fp32", changes=size, published=published.FP16_BATCH[batch, "fp32"],
                 against="batch 8, fp32" if batch > 8 else None, feature="batch size" if batch > 8 else None),
            Rung(name=f"batch {batch}, fp16", changes={**size, "precision": "fp16"}, feature="mixed precision",
                 published=published.FP16_BATCH[batch, "fp16"], against=f"batch {batch}, fp32"),
        ]  # fmt: skip
    return Ladder(
        name="fp16-batch", title="BERT-base, sequence classification, 128 tokens: fp16 against fp32",
        base={**PLAIN, "model": "bert-base", "task": "sequence-classification", "num_labels": 2,
              "data": {"source": "dummy", "samples": 512}, "seq_len": 128, "learning_rate": 5e-5},
        published_on="one of two GPUs (model not named)", gpu="titan-rtx", card_named=False, rungs=tuple(rungs),
        shrunk=_shrunk(BERT, seq_len={"reduced": 64, "smallest": 32}),
        notes=("published on two GPUs, memory of each; here on one, with no gradients exchanged",),
    )  # fmt: skip


def accumulation() -> Ladder:
    """Micro-batch against accumulation, at one global batch."""
    def named(micro: int) -> str:
        return f"micro-batch {micro}, accumulation {64 // micro}"

    sizes = (64, 32, 16, 8, 4, 2, 1)
    return Ladder(
        name="accumulation", title="GPT-2: micro-batch against accumulation at a global batch of 64",
        base={**PLAIN, "model": "gpt2", "data": {"source": "dummy", "samples": 512}, "seq_len": 512, "batch_size": 64,
              "attention": "sdpa"},
        shrunk=_shrunk(GPT2, seq_len={"reduced": 64, "smallest": 32}),
        rungs=tuple(Rung(name=named(micro), changes={"micro_batch_size": micro}, feature="gradient accumulation",
                         against=named(64) if micro < 64 else None) for micro in sizes),
    )  # fmt: skip


def checkpointing() -> Ladder:
    """Every kind of checkpointing, at one batch and at the larger one that it allows."""
    rungs = [Rung(name="none")]
    for technique in SLOTS["checkpointing"][1:]:
        for setting in technique.rungs():
            name, changes = setting_name(setting), setting_alone(setting)
            rungs += [Rung(name=name, changes=changes, against="none", feature="gradient checkpointing"),
                      Rung(name=f"{name}, larger batch", changes=changes, against="none", grows=True)]
    return Ladder(
        name="checkpointing", title="GPT-2 medium: every kind of checkpointing, and the larger batch that it allows",
        base={**PLAIN, "model": "gpt2-medium", "data": {"source": "dummy", "samples": 512}, "seq_len": 1024,
              "batch_size": 4, "micro_batch_size": 4, "attention": "sdpa"},
        shrunk=_shrunk(GPT2, seq_len={"reduced": 128, "smallest": 64}), rungs=tuple(rungs),
        notes=("a larger batch: the largest that is predicted to need no more memory than the batch of 4 without "
               "checkpointing",),
    )  # fmt: skip


def loading() -> Ladder:
    """How batches reach the device, and what giving cached memory back costs."""
    first = "workers 0"

    def rung(name: str, feature: str = "data loading", **changes: Any) -> Rung:
        return Rung(name=name, changes=changes, against=first, feature=feature)

    return Ladder(
        name="loading", title="ViT-base on random images: workers, pinned memory, emptying the cache",
        base={**PLAIN, "model": "vit-base", "task": "image-classification", "num_labels": 100,
              "data": {"source": "dummy", "samples": 512}, "batch_size": 64, "micro_batch_size": 64,
              "attention": "sdpa"},
        shrunk=_shrunk({
            "reduced": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256},
            "smallest": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
        }, batch_size={"reduced": 16, "smallest": 4}, micro_batch_size={"reduced": 16, "smallest": 4}),
        rungs=(
            Rung(name=first),
            rung("workers 0, not pinned", loading=_loading(0, pin_memory=False)),
            *(rung(f"workers {workers}", loading=_loading(workers)) for workers in (1, 2, 4)),
            rung("workers 2, not pinned", loading=_loading(2, pin_memory=False)),
            rung("workers 2, 4 windows ahead", loading=_loading(2, prefetch=4)),
            rung("cache emptied every 10 steps", "empty cache steps", empty_cache_steps=10),
            rung("cache emptied every step", "empty cache steps", empty_cache_steps=1),
        ),
    )  # fmt: skip


def _loading(workers: int, **knobs: Any) -> dict[str, Any]:
    assert set(knobs) <= set(vars(Loading())), knobs
    return {"workers": workers, **knobs}


def ddp() -> Ladder:
    """Two devices, by DataParallel and by DistributedDataParallel with and without their direct link."""
    names = {"dp": "DP", "ddp": "DDP", "ddp-no-p2p": "DDP, NCCL_P2P_DISABLE=1"}
    return Ladder(
        name="ddp", title="GPT-2 on two devices, 4 sequences each",
        base={**PLAIN, "model": "gpt2", "data": {"source": "dummy", "samples": 512}, "seq_len": 1024, "batch_size": 8,
              "micro_batch_size": 4, "attention": "sdpa"},
        published_on="two TITAN RTX with NVLink", gpu="titan-rtx", steps_published=200,
        shrunk=_shrunk(GPT2, seq_len={"reduced": 128, "smallest": 32}),
        rungs=tuple(Rung(name=names[launch], launch=launch, published=published.TWO_GPUS[launch],
                         against=None if launch == "dp" else "DP") for launch in ("dp", "ddp", "ddp-no-p2p")),
        notes=("published with wikitext; here with random tokens. Without two GPUs DDP runs as two processes on the "
               "processor, over gloo",),
    )  # fmt: skip


def transformer() -> Ladder:
    """The notebook's transformer, by format, compiling, checkpointing and batch."""
    figures, half = published.TRANSFORMER, {"precision": "bf16"}
    compiled = {**half, "compile": "per-block"}
    kept = {**compiled, "checkpointing": "every-block"}
    apart = figures["bf16, scan, remat MLP+Attn"]
    near = "the notebook recomputes each block's two halves apart; here the block as one"
    return Ladder(
        name="transformer-156m", title="The notebook's transformer, 156 million parameters, 64 x 512 tokens",
        base={**PLAIN, "model": "transformer-156m", "data": {"source": "dummy", "samples": 512}, "seq_len": 512,
              "batch_size": 64, "micro_batch_size": 16,
              "optimizer": {"name": "adamw", "implementation": "foreach", "weight_decay": 0.0},
              "learning_rate": 4e-4},
        published_on="A5000 24 GB, JAX", gpu="rtx-a5000", steps_published=1, published_memory="allocator",
        shrunk=_shrunk({
            "reduced": {"num_layers": 4, "hidden_size": 128, "head_dim": 32, "num_heads": 4},
            "smallest": {"num_layers": 2, "hidden_size": 64, "head_dim": 16, "num_heads": 4},
        }, seq_len={"reduced": 64, "smallest": 16}),
        rungs=(
            Rung(name="fp32", published=figures["fp32, scan"], note="published with layers by scan; here by a loop"),
            Rung(name="bf16", changes=half, published=figures["bf16, scan"], against="fp32", feature="mixed precision",
                 note="published with layers by scan; here by a loop, uncompiled"),
            Rung(name="bf16, compiled", changes=compiled, published=figures["bf16, no scan"], against="bf16",
                 feature="torch.compile", note="XLA compiles the whole step, torch.compile each block"),
            Rung(name="bf16, compiled, checkpointing", changes=kept, published=figures["bf16, scan, remat Block"],
                 against="bf16, compiled", feature="gradient checkpointing"),
            Rung(name="the same, 1 micro-batch", changes={**kept, "micro_batch_size": 64}, note=near,
                 published=figures["1 minibatch"], against="bf16, compiled, checkpointing"),
            Rung(name="the same, batch 256", changes={**kept, "batch_size": 256, "micro_batch_size": 256}, note=near,
                 published=figures["batch 256"], against="the same, 1 micro-batch"),
            Rung(name="bf16, SDPA, compiled", changes={**compiled, "attention": "sdpa"}, against="bf16, compiled",
                 feature="SDPA"),
            Rung(name="bf16, SDPA, compiled, checkpointing", changes={**kept, "attention": "sdpa"},
                 against="bf16, SDPA, compiled", feature="gradient checkpointing"),
            Rung(name="what the plan chooses", changes=AUTO, against="fp32"),
            Rung(name="what it chooses where numerics may change", changes={**AUTO, "allow_numerics": True},
                 against="fp32"),
        ),
        notes=("published in JAX, where everything is compiled; memory as the allocator counts it",
               "the published rung that recomputes each block's two halves apart "
               f"({apart.memory_mib:,.0f} MiB, {apart.seconds} s) is in this ladder's own for JAX: write backend=jax"),
    )  # fmt: skip


LADDERS: dict[str, Callable[[], Ladder]] = {
    "bert-large": bert_large, "fp16-batch": fp16_batch, "accumulation": accumulation, "checkpointing": checkpointing,
    "loading": loading, "ddp": ddp, "transformer-156m": transformer, "transformer-156m-jax": transformer_jax,
}  # fmt: skip
"""Each ladder, by its name."""
IN_JAX = {"transformer-156m": "transformer-156m-jax"}
"""The ladders that have one of their own for `backend=jax`."""
