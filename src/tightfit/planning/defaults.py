"""Simple, documented choices for a recipe's `auto` fields.

| field | choice |
|---|---|
| micro_batch_size | the largest power of two with at most 16,384 tokens on a CUDA device and 4,096 on the CPU, at most the global batch |
| precision | CUDA: bf16 from compute capability 8.0, below it fp16, or fp32 with JAX; CPU: fp32 |
| checkpointing | none |
| optimizer | adamw, fused |
| loss | plain |
| attention | sdpa, its kernel chosen by the framework |
| accumulation | PyTorch: loop; JAX: scan |
| compile | off |
| backend.layers | unrolled |
| loading.workers | CUDA: 2; CPU: 0 |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from dataclasses import replace

from tightfit.devices import Device
from tightfit.recipe import Recipe
from tightfit.techniques.accumulation import Loop, Scan
from tightfit.techniques.attention import Sdpa
from tightfit.techniques.base import Technique
from tightfit.techniques.checkpointing import NoCheckpointing
from tightfit.techniques.compile import NoCompile
from tightfit.techniques.loss import Plain
from tightfit.techniques.optimizer import AdamW
from tightfit.techniques.precision import Fp32, half_precision

MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}
WORKERS = {"cuda": 2, "cpu": 0}


def resolve(recipe: Recipe, device: Device) -> Recipe:
    """The recipe with every `auto` replaced; what a person pinned stays."""
    choices: dict[str, Technique | int] = {
        "micro_batch_size": _micro_batch(recipe, device),
        "precision": _precision(recipe, device),
        "loss": Plain(),
        "checkpointing": NoCheckpointing(),
        "optimizer": AdamW(),
        "attention": Sdpa(),
        "compile": NoCompile(),
    }
    changes: dict[str, object] = {name: value for name, value in choices.items() if getattr(recipe, name) == "auto"}
    return settle_rest(recipe.model_copy(update=changes), device)


def settle_rest(recipe: Recipe, device: Device) -> Recipe:
    """The recipe with what a search does not decide replaced: how micro-batches and layers follow one another, and the
    number of workers."""
    changes: dict[str, Technique] = {}
    if recipe.accumulation == "auto":
        changes["accumulation"] = Scan() if recipe.backend.compiles_whole_steps else Loop()
    if (backend := recipe.backend.alternatives()[0]) != recipe.backend:
        changes["backend"] = backend
    if recipe.loading.workers == "auto":
        changes["loading"] = replace(recipe.loading, workers=WORKERS[device.kind])
    return recipe.model_copy(update=changes) if changes else recipe


def _micro_batch(recipe: Recipe, device: Device) -> int:
    fits = max(MICRO_BATCH_TOKENS[device.kind] // recipe.seq_len, 1)
    return min(1 << (fits.bit_length() - 1), recipe.batch_size)


def _precision(recipe: Recipe, device: Device) -> Technique:
    if device.kind == "cpu":
        return Fp32()
    return half_precision(device)()
