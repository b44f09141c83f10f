"""A bare loop, as a careful person writes it in PyTorch alone, and what it shares with the other peers.

The model and the data are as ours has them, before any technique is applied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.attention import sdpa_kernel
from torch.optim import Optimizer

from tightfit.backends.measurements import Timings
from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.measure.meter import Meter
from tightfit.backends.pytorch.models import logits_of
from tightfit.backends.pytorch.techniques.attention.apply import SDP_BACKENDS
from tightfit.backends.pytorch.techniques.attention.functions import EAGER, FLEX, SDPA
from tightfit.backends.pytorch.techniques.loading import loading
from tightfit.backends.pytorch.techniques.optimizer.apply import ADAFACTOR_EPS, IMPLEMENTATIONS, parameter_groups
from tightfit.backends.pytorch.techniques.precision import fp32_products
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, Refused
from tightfit.ladder.peers import check_rows
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE
from tightfit.techniques.attention import Attention, Sdpa
from tightfit.techniques.compile import PerBlock, WholeModel
from tightfit.techniques.optimizer import Adafactor, AdamW, AdamW4bit, AdamW8bit, Sgd
from tightfit.training.session import training_global_batches

TRANSFORMER_ATTENTION = {"eager": EAGER, "sdpa": SDPA, "flex": FLEX}
"""The bundled transformer's functions."""
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def run(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """Take the recipe's steps in a loop of its own. Raises Refused, MissingLibrary, OutOfMemory."""
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed)
    on_cuda = device.kind == "cuda"
    with (
        memory_guard(lambda: "the plain loop"), named_kernel(recipe),
        fp32_products(recipe.tf32) if on_cuda else nullcontext(),
    ):  # fmt: skip
        return _train(recipe, device, meter)


def _train(recipe: Recipe, device: Device, meter: Meter) -> Timings:
    data, build = training_global_batches(recipe), bare(recipe, device)
    checkpoint_blocks(build)
    model = compile_model(build)
    optimizer = make_optimizer(recipe, build.model)
    assert recipe.precision != "auto"
    dtype = AUTOCAST.get(recipe.precision.name)
    scaler = torch.amp.GradScaler(device.kind, enabled=dtype == torch.float16)
    global_batches = loading(recipe.loading, build).global_batches
    assert global_batches is not None
    meter.start()
    for step, global_batch in enumerate(global_batches(data, 0, meter.total, None), 1):
        total = torch.zeros((), device=build.torch_device)
        for batch in global_batch.micro_batches:
            with torch.autocast(device.kind, dtype, enabled=dtype is not None):
                loss = _loss_sum(model, batch.to(build.torch_device), recipe) / global_batch.count
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        if recipe.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if recipe.empty_cache_steps and step % recipe.empty_cache_steps == 0:
            torch.cuda.empty_cache()
        meter.end(total.item())
    return meter.read()


def _loss_sum(model: nn.Module, batch: TensorBatch, recipe: Recipe) -> Tensor:
    """A micro-batch's summed loss; the logits are let go on return, where the loop would hold them until the next."""
    weights = next(model.parameters()).dtype
    return loss_sum(logits_of(model(**model_arguments(batch, weights))), batch.labels, recipe)


def bare(recipe: Recipe, device: Device) -> Build:
    """The recipe's model with its initial weights, calling the attention that it names, and no other technique applied.

    Raises Refused for what no peer has.
    """
    check_rows(recipe)
    reasons = recipe.refusals(device)
    if recipe.pad_vocab_to:
        reasons.append("pad_vocab_to: no peer cuts the added logits off again; write pad_vocab_to=null")
    assert recipe.checkpointing != "auto"
    assert recipe.attention != "auto"
    if recipe.checkpointing.name not in ("none", "every-block", "every-nth"):
        reasons.append(f"checkpointing: no peer has {recipe.checkpointing.name}, they recompute whole blocks; write "
                       "every-block or every-nth")
    if reasons:
        raise Refused("; ".join(reasons))
    build = bare_build(recipe, device, torch.device(device.kind))
    if checkpointed_blocks(recipe) and not getattr(build.model, "supports_gradient_checkpointing", True):
        raise Refused(f"checkpointing: {type(build.model).__name__} does not support it; write checkpointing=none")
    _attend(build.model, recipe.attention)
    return build


def model_arguments(batch: TensorBatch, weights: torch.dtype) -> dict[str, Tensor]:
    """A micro-batch as models take it, without its labels; images in the format of the weights."""
    arguments = {name: t.to(weights) if t.is_floating_point() else t for name, t in batch.inputs.items()}
    if batch.padding_mask is not None:
        arguments["attention_mask"] = batch.padding_mask.long()
    return arguments


def checkpointed_blocks(recipe: Recipe) -> int:
    """One block in how many is recomputed; 0 for none of them."""
    assert recipe.checkpointing != "auto"
    return {"none": 0, "every-block": 1}.get(recipe.checkpointing.name, getattr(recipe.checkpointing, "n", 0))


def checkpoint_blocks(build: Build) -> None:
    """Recompute whole blocks where the recipe says so: as transformers' models offer to, or one by one."""
    model, every = build.model, checkpointed_blocks(build.recipe)
    if every and isinstance(model, transformers.PreTrainedModel):
        model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    elif every:
        chosen = {block for stack in build.stacks for block in stack[::every]}
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)


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


def loss_sum(logits: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """The summed cross-entropy of the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum",
                           label_smoothing=recipe.label_smoothing_factor)


def named_kernel(recipe: Recipe) -> AbstractContextManager[None]:
    """Holds the SDPA kernel that the recipe names."""
    kernel = getattr(recipe.attention, "kernel", "auto")
    return nullcontext() if kernel == "auto" else sdpa_kernel([SDP_BACKENDS[kernel]])


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


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer over the model's parameters, those that decay apart from those that do not.

    Raises Refused where no optimizer of torch's or torchao's is it alone.
    """
    technique, rate, precision = recipe.optimizer, recipe.learning_rate, recipe.precision
    if reason := rounding_refused(recipe, "torch's"):
        raise Refused(reason)
    assert technique != "auto"
    assert precision != "auto"
    groups = parameter_groups(model, getattr(technique, "weight_decay", 0.0))
    match technique:
        case AdamW(implementation="apex"):
            raise Refused("optimizer.implementation: apex is not torch's; write optimizer.implementation=fused")
        case AdamW():
            return optim.AdamW(groups, lr=rate, betas=technique.betas, eps=technique.eps,
                               **IMPLEMENTATIONS[technique.implementation])
        case Sgd():
            return optim.SGD(groups, lr=rate, momentum=technique.momentum)
        case Adafactor(scale_parameter=False):
            raise Refused("optimizer.scale_parameter: false is not torch's; write optimizer.scale_parameter=true")
        case Adafactor():
            return optim.Adafactor(groups, lr=rate, eps=ADAFACTOR_EPS)
        case AdamW8bit() | AdamW4bit():
            try:
                from torchao import optim as quantized
            except ImportError as error:
                raise MissingLibrary("torchao", f"optimizer {technique.name}") from error
            make = quantized.AdamW8bit if isinstance(technique, AdamW8bit) else quantized.AdamW4bit
            made: Optimizer = make(groups, lr=rate, betas=technique.betas, block_size=technique.block_size,
                                   bf16_stochastic_round=precision.weight_rounding == "stochastic")
            return made
    raise Refused(f"optimizer: a bare loop here has no {technique.name}; write adamw, sgd, adafactor, "
                  "adamw-8bit or adamw-4bit")


def rounding_refused(recipe: Recipe, whose: str) -> str:
    """The reason why none of somebody's optimizers rounds 16-bit weights as the recipe says; empty where one does."""
    assert recipe.precision != "auto"
    rounding = recipe.precision.weight_rounding
    able = ("nearest", "stochastic") if isinstance(recipe.optimizer, AdamW8bit | AdamW4bit) else ("nearest",)
    if rounding is None or rounding in able:
        return ""
    return (f"precision.rounding: {rounding!r} is in none of {whose} optimizers; write precision.rounding="
            f"{' or '.join(able)}")
