"""The peers' common ground: the model and the data as ours has them, before any technique is applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.attention import sdpa_kernel

from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.attention.apply import KERNELS
from tightfit.backends.pytorch.techniques.attention.functions import EAGER, FLEX, SDPA
from tightfit.backends.pytorch.techniques.precision import fp32_products
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.data.loading import WindowLoader
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.ladder.peers import PACKED
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE
from tightfit.techniques.attention import Attention, Sdpa
from tightfit.techniques.compile import PerBlock, WholeModel
from tightfit.training.session import training_windows

TRANSFORMER_ATTENTION = {"eager": EAGER, "sdpa": SDPA, "flex": FLEX}
"""The bundled transformer's functions."""
ONE_BLOCK_IN = {"none": 0, "every-block": 1, "every-nth": None}
"""How many blocks there are to each that a peer recomputes; None: the technique's own n."""


def bare(recipe: Recipe, device: Device) -> Build:
    """The recipe's model with its initial weights, calling the attention that it names, and no other technique applied.

    Raises Refused for what no peer has.
    """
    reasons = recipe.refusals(device)
    if recipe.pad_vocab_to:
        reasons.append("pad_vocab_to: no peer cuts the added logits off again; write pad_vocab_to=null")
    assert recipe.checkpointing != "auto"
    assert recipe.attention != "auto"
    if recipe.checkpointing.name not in ONE_BLOCK_IN:
        reasons.append(f"checkpointing: no peer has {recipe.checkpointing.name}, they recompute whole blocks; write "
                       "every-block or every-nth")
    if reasons:
        raise Refused("; ".join(reasons))
    build = bare_build(recipe, device, torch.device(device.kind))
    if checkpointed_blocks(recipe) and not getattr(build.model, "supports_gradient_checkpointing", True):
        raise Refused(f"checkpointing: {type(build.model).__name__} does not support it; write checkpointing=none")
    _attend(build.model, recipe.attention)
    return build


def training_data(recipe: Recipe) -> WindowLoader:
    """The recipe's samples in its order. Raises Refused where documents share a row."""
    data = training_windows(recipe)
    if data.window(0).micro_batches[0].mask == "packed":
        raise Refused(PACKED)
    return data


def whole_steps(data: WindowLoader, recipe: Recipe, steps: int, peer: str) -> Sequence[tuple[np.ndarray, int]]:
    """The samples of the first steps, each with its epoch. Raises Refused where one has fewer than the others, for a
    peer that counts micro-batches."""
    chosen = [data.chosen(step) for step in range(steps)]
    if any(len(samples) < recipe.batch_size for samples, _ in chosen):
        raise Refused(f"batch_size: an epoch's last step has fewer samples, and {peer} counts micro-batches; write a "
                      "batch_size that divides the samples, or take fewer steps")
    return chosen


def model_arguments(batch: TensorBatch, weights: torch.dtype) -> dict[str, Tensor]:
    """A micro-batch as models take it, without its labels; images in the format of the weights."""
    arguments = {name: t.to(weights) if t.is_floating_point() else t for name, t in batch.inputs.items()}
    if batch.padding is not None:
        arguments["attention_mask"] = batch.padding.long()
    return arguments


def checkpointed_blocks(recipe: Recipe) -> int:
    """One block in how many is recomputed; 0 for none of them."""
    every = ONE_BLOCK_IN[getattr(recipe.checkpointing, "name", "none")]
    return getattr(recipe.checkpointing, "n", 0) if every is None else every


def checkpoint_blocks(build: Build) -> None:
    """Recompute whole blocks where the recipe says so: as transformers' models offer to, or one by one."""
    model, every = build.model, checkpointed_blocks(build.recipe)
    if not every:
        return
    if not isinstance(model, transformers.PreTrainedModel):
        chosen = {block for stack in build.stacks for block in stack[::every]}
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
        return
    model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)


def compile_model(build: Build) -> nn.Module:
    """The model to call: compiled as a whole, or its blocks in place, where the recipe says so."""
    technique, model = build.recipe.compile, build.model
    if not isinstance(technique, PerBlock | WholeModel):
        return model
    mode = technique.mode if technique.backend == "inductor" else None  # the other backends have no modes
    if isinstance(technique, WholeModel):
        return cast(nn.Module, torch.compile(model, backend=technique.backend, mode=mode))
    for stack in build.stacks:
        for block in stack:
            block.compile(backend=technique.backend, mode=mode)
    return model


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy of the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def named_kernel(recipe: Recipe) -> AbstractContextManager[None]:
    """Holds the SDPA kernel that the recipe names."""
    kernel = getattr(recipe.attention, "kernel", "auto")
    return nullcontext() if kernel == "auto" else sdpa_kernel([KERNELS[kernel]])


@contextmanager
def settings(recipe: Recipe, device: Device) -> Iterator[None]:
    """Hold the named kernel and, on CUDA, the format of fp32 products, around a loop of one's own."""
    with ExitStack() as held:
        if device.kind == "cuda":
            held.enter_context(fp32_products(getattr(recipe.precision, "tf32", False)))
        held.enter_context(named_kernel(recipe))
        yield


def _attend(model: nn.Module, attention: Attention) -> None:
    """Have the model call that attention. A choice of kernel that PyTorch makes anyway is no choice of the model."""
    if isinstance(model, Transformer):
        if attention.name not in TRANSFORMER_ATTENTION:
            raise Refused(f"attention: the bundled transformer has no {attention.name}; write attention=sdpa")
        model.config._attn_implementation = TRANSFORMER_ATTENTION[attention.name]
        return
    automatic = isinstance(attention, Sdpa) and attention.kernel == "auto"
    if not isinstance(model, transformers.PreTrainedModel):
        if not automatic:
            raise Refused(f"attention: {type(model).__name__} has no attn_implementation to set; write attention=sdpa")
        return
    try:
        model.set_attn_implementation(attention.hf_name)
    except (ValueError, ImportError) as error:
        if not automatic:
            raise Refused(f"attention: {' '.join(str(error).split())}") from None
