"""The optimizers: which parameters decay, and which library's code updates them.

What `learning_rate` means differs. AdamW, the 8-bit and 4-bit ones among them, and Lion move a weight by about the
learning rate in one step; SGD by the learning rate times the velocity; Adafactor by at most the learning rate times
the root mean square of the weight's own tensor, so that its learning rate is a relative one. Weight decay multiplies
weights by `1 - learning_rate * weight_decay` in every optimizer but SGD, which adds `weight_decay * weight` to the
gradient.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.simulated_device import active_simulated_cuda
from tightfit.errors import ModelError, Refused
from tightfit.techniques import optimizer as declared

Groups = list[dict[str, Any]]

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "auto": {"fused": True},
    "fused": {"fused": True},
    "foreach": {"foreach": True, "fused": False},
    "loop": {"foreach": False, "fused": False},
}
"""torch.optim's own switches for each implementation."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ADAFACTOR_EPS = (1e-15, 1e-3)
"""The paper's floors, 1e-30 on squared gradients and 1e-3 on a tensor's scale. torch.optim's default for the first is
the dtype's rounding error, 7.8e-3 for bf16: larger than most gradients, which would turn the method into plain SGD."""


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """The trainable parameters in two groups, as of `by_decay`; a group with nothing in it is left out."""
    decay, keep = by_decay(model)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters, in the model's order: those that decay, and those that do not.

    Biases (experts' too, stacked to a matrix, and tables of position biases), vectors and whatever a normalization
    layer owns do not decay. A tied parameter appears once, a frozen one not at all. Raises ModelError if nothing is
    trainable, or a table's gradient is sparse.
    """
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ModelError(f"model: the gradient of its module {path!r} is sparse, which neither clipping nor an "
                             "optimizer here takes; write sparse=False there")
        normalizes = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            biases = "bias" in f"{path}.{name}"  # as transformers reads the names: T5's relative_attention_bias.weight
            (keep if normalizes or biases or parameter.ndim < 2 else decay).append(parameter)
    if not seen:
        raise ModelError(f"model: {type(model).__name__} has no parameter that requires a gradient; nothing to train")
    return decay, keep


def embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of every embedding table, which an output layer may be tied to."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [parameter for table in tables for parameter in table.parameters(recurse=False)]


def adamw(technique: declared.AdamW, build: Build) -> Build:
    """torch.optim.AdamW, or Apex's; over bf16 weights with Kahan or stochastic rounding, our own with bf16 states."""
    options = {"betas": technique.betas, "eps": technique.eps}
    rounding = build.recipe.weight_rounding
    if rounding in ("kahan", "stochastic"):
        return _anyprecision(build, technique.weight_decay, rounding=rounding, **options)
    if technique.implementation == "apex":
        return _apex(technique, build, options)
    implementation = technique.implementation
    if implementation == "auto" and any(parameter.is_complex() for parameter in build.model.parameters()):
        implementation = "foreach"  # the fused kernel takes real numbers alone
    return _with(build, torch.optim.AdamW, technique.weight_decay, **options, **IMPLEMENTATIONS[implementation])


def _apex(technique: declared.AdamW, build: Build, options: dict[str, Any]) -> Build:
    """Apex's fused AdamW, of which each parameter's state has the count of steps that Apex keeps by group: a checkpoint
    holds the states. In a plan, on whose tensors its kernels cannot run, torch's of the same states."""
    if active_simulated_cuda() is not None:
        note = "optimizer: Apex's kernel is planned as torch's own fused one, whose states it has"
        build = replace(build, notes=(*build.notes, note))
        return _with(build, torch.optim.AdamW, technique.weight_decay, **options, **IMPLEMENTATIONS["fused"])
    try:
        fused: Any = importlib.import_module("apex.optimizers").FusedAdam
    except (ImportError, AttributeError):
        raise Refused("optimizer.implementation: apex needs NVIDIA's Apex, which is not installed (pip's package of "
                      "that name is another one); build it from github.com/NVIDIA/apex, or write "
                      "optimizer.implementation=fused") from None

    def made(groups: Groups, **options: Any) -> Optimizer:
        optimizer: Optimizer = fused(groups, adam_w_mode=True, **options)
        optimizer.register_step_pre_hook(_count_by_group)
        optimizer.register_step_post_hook(_count_by_state)
        return optimizer

    return _with(build, made, technique.weight_decay, **options)


def _count_by_group(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["step"] = max((optimizer.state[parameter].get("step", 0) for parameter in group["params"]
                             if parameter in optimizer.state), default=0)


def _count_by_state(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                optimizer.state[parameter]["step"] = group["step"]


def sgd(technique: declared.Sgd, build: Build) -> Build:
    """torch.optim.SGD, its foreach form on CUDA; over bf16 weights with Kahan summation, optimi's.

    Never its fused form: over bf16 weights on the CPU that leaves most of them untouched (torch 2.13, pytorch issue
    191763), and it takes a step that loss scaling meant to skip into its velocity.
    """
    if build.recipe.weight_rounding == "kahan":
        import optimi

        return _with(build, optimi.SGD, technique.weight_decay, momentum=technique.momentum, kahan_sum=True)
    options = {"momentum": technique.momentum, "foreach": build.device.kind == "cuda", "fused": False}
    return _with(build, torch.optim.SGD, technique.weight_decay, **options)


def adafactor(technique: declared.Adafactor, build: Build) -> Build:
    """torch.optim.Adafactor, one parameter at a time, whose learning rate bounds the step relative to the weights; or
    transformers', whose learning rate bounds it as it is."""
    if not technique.scale_parameter:
        from transformers.optimization import Adafactor

        return _with(build, Adafactor, technique.weight_decay, scale_parameter=False, relative_step=False)
    return _with(build, torch.optim.Adafactor, technique.weight_decay, eps=ADAFACTOR_EPS, foreach=False)


def lion(technique: declared.Lion, build: Build) -> Build:
    """optimi.Lion: its Triton kernel where that runs, else one parameter at a time."""
    kahan = build.recipe.weight_rounding == "kahan"
    import optimi

    # Left to itself it decides in the first step, and names later states otherwise than the first ones.
    triton = (build.torch_device.type == "cuda" and importlib.util.find_spec("triton") is not None
              and torch.cuda.is_bf16_supported())
    return _with(build, optimi.Lion, technique.weight_decay, betas=technique.betas, kahan_sum=kahan, triton=triton)


def adamw_anyprecision(technique: declared.AdamWAnyPrecision, build: Build) -> Build:
    """Our AdamW with the states' formats as declared."""
    return _anyprecision(
        build, technique.weight_decay, momentum_dtype=DTYPES[technique.momentum],
        variance_dtype=DTYPES[technique.variance], rounding=build.recipe.weight_rounding or "nearest",
    )  # fmt: skip


def _anyprecision(build: Build, weight_decay: float, **options: Any) -> Build:
    from tightfit.backends.pytorch.techniques.optimizer.anyprecision import AnyPrecisionAdamW
    from tightfit.backends.pytorch.techniques.optimizer.compiled_update import compiled_update

    return _with(build, AnyPrecisionAdamW, weight_decay, update=compiled_update(build), **options)


def _with(build: Build, make: Callable[..., Optimizer], weight_decay: float, **options: Any) -> Build:
    rate = build.recipe.learning_rate

    def factory(model: nn.Module) -> Optimizer:
        return make(parameter_groups(model, weight_decay), lr=rate, **options)

    return replace(build, optimizer_factory=factory)


def quantized(technique: declared.AdamW8bit | declared.AdamW4bit, build: Build) -> Build:
    """torchao's optimizer of the technique's name, with the states of every embedding table left at 32 bits."""
    try:  # here, for torchao takes a second to import, and does not promise to keep its inner parts
        from tightfit.backends.pytorch.techniques.optimizer import quantized_adamw
    except ImportError as error:
        raise ModelError(f"optimizer: this version of torchao lacks what the 8-bit and 4-bit optimizers need: {error}; "
                         "write optimizer=adamw, or install torchao 0.17") from error
    shapes_alone = any(isinstance(parameter, FakeTensor) for parameter in build.model.parameters())  # as in planning
    return _with(
        build, getattr(quantized_adamw, type(technique).__name__), technique.weight_decay,
        in_32_bits=embedding_parameters(build.model), betas=technique.betas, block_size=technique.block_size,
        bf16_stochastic_round=build.recipe.weight_rounding == "stochastic",
        declared=build.device.kind == "cuda" and shapes_alone,
    )  # fmt: skip
