"""The attention function that a model calls, the masks it is given, and the SDPA kernels that may run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.simulated_device import active_simulated_cuda
from tightfit.backends.pytorch.techniques.attention import arguments
from tightfit.backends.pytorch.techniques.attention.functions import EAGER, FLEX, SDPA, register
from tightfit.backends.pytorch.techniques.attention.kernels import HALF
from tightfit.errors import Refused, install_command
from tightfit.model_facts import attention_dropout
from tightfit.techniques.attention import Eager, FlashAttn, Flex, Sdpa

SDP_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def eager(technique: Eager, build: Build) -> Build:
    """Our eager function; where the model computes attention itself, its own eager code."""
    if arguments.attention_style(build.model) != "own":
        return _ours(EAGER, build)
    if not arguments.is_hf(build.model):
        raise _refused("eager", build.model)
    cast(Any, build.model).config._attn_implementation = "eager"
    return _with_masks(build, "own")


def sdpa(technique: Sdpa, build: Build) -> Build:
    """Our SDPA function, and the named kernel alone while steps run. Where SDPA cannot serve the model, a named
    kernel is refused; `auto` falls back and says so."""
    style, special = arguments.attention_style(build.model), arguments.needs_eager(build.model)
    if technique.kernel == "auto":
        if style == "own":
            kept = f"attention: {type(build.model).__name__} computes attention itself; that is kept"
            if arguments.reads_the_mask(build.model):
                cast(Any, build.model).config._attn_implementation = "eager"
            return _with_masks(build, "own", kept)
        if special:
            return _ours(EAGER, build, f"attention: this model's {special} need eager attention, which is used")
        return _ours(SDPA, build, *_dense_note(technique, build))
    if special:
        raise Refused(f"attention.kernel: {technique.kernel!r} cannot serve this model's {special}; "
                      "write attention=eager")
    if style == "own":
        raise _refused(f"sdpa with the {technique.kernel} kernel", build.model)
    dropout = _dropout(build)
    if technique.kernel == "flash" and build.device.kind == "cpu" and dropout is not None:
        raise Refused(f"attention.kernel: the CPU's flash kernel has no dropout; write model_overrides.{dropout}=0 or "
                      "attention.kernel=auto")
    ours = _ours(SDPA, build, *_dense_note(technique, build))
    return replace(ours, settings=(*ours.settings, partial(sdpa_kernel, [SDP_BACKENDS[technique.kernel]])))


def _dropout(build: Build) -> str | None:
    """The configuration's field that sets dropout inside attention, where the model has one and it is more than 0."""
    return attention_dropout(getattr(build.model, "config", None))


def _dense_note(technique: Sdpa, build: Build) -> tuple[str, ...]:
    """A sentence where, on CUDA, packed documents will cost SDPA a T x T mask: see `kernels.packed_way`."""
    if build.device.kind != "cuda" or not (build.task.packs and build.recipe.data.packing):
        return ()
    dropout, precision = _dropout(build), build.recipe.precision
    reasons = []
    if not build.device.has_flash:
        reasons = [f"the {build.device.name} has no variable-length kernel; write data.packing=false or attention=flex"]
    else:
        if precision != "auto" and not precision.is_half and not any(p.dtype in HALF for p in build.model.parameters()):
            reasons.append("fp32 has no variable-length kernel; write precision=bf16 or attention=flex")
        if not technique.packs_unmasked:
            reasons.append("the variable-length kernel is the flash one; write attention.kernel=auto")
        if dropout is not None:
            reasons.append(f"the variable-length kernel has no dropout; write model_overrides.{dropout}=0")
    costly = "attention: packed documents are kept apart by a mask of seq_len x seq_len"
    return (f"{costly}: {'; '.join(reasons)}",) if reasons else ()


def flex(technique: Flex, build: Build) -> Build:
    """Our FlexAttention function."""
    if arguments.attention_style(build.model) == "own" or arguments.has_sinks(build.model):
        raise _refused("flex", build.model)
    if build.recipe.mode == "train" and (dropout := _dropout(build)) is not None:
        raise Refused(f"attention: flex has no dropout; write model_overrides.{dropout}=0 or attention=sdpa")
    return _ours(FLEX, build)


def flash_attn(technique: FlashAttn, build: Build) -> Build:
    """The flash-attn library, as transformers calls it; in a plan without it, PyTorch's own kernels."""
    model = build.model
    unserved = arguments.attention_style(model) == "own" or arguments.has_sinks(model)
    if unserved or not getattr(model, "_supports_flash_attn", False):
        raise _refused("flash-attn", model)
    if find_spec("flash_attn") is None:
        missing = f"the library flash-attn is not installed; run: {install_command('flash-attn')}"
        if active_simulated_cuda() is None:
            raise Refused(f"attention: {missing}, or write attention=sdpa")
        made, note = sdpa(Sdpa(), build), f"attention: planned with PyTorch's own kernels, for {missing}"
        return replace(made, notes=(*made.notes, note))
    _call("flash_attention_2", model)
    return _with_masks(build, "flash")


def _ours(name: str, build: Build, *notes: str) -> Build:
    """The model calls our function of that name."""
    register()
    _call(name, build.model)
    if arguments.attention_style(build.model) == "patterns":
        return _with_masks(build, "padding", *notes)
    return _with_masks(build, "blocks" if name == FLEX else "typed", *notes)


def _with_masks(build: Build, way: arguments.Way, *notes: str) -> Build:
    causal = build.task.name == "causal-lm" if way == "own" else arguments.is_causal_model(build.model)
    masks = arguments.mask_arguments(build.model, way, causal)
    return replace(build, mask_arguments=masks, notes=(*build.notes, *notes))


def _call(name: str, model: nn.Module) -> None:
    """Make the model, and every model inside it, call the attention function of that name."""
    if not arguments.is_hf(model):
        cast(Any, model).config._attn_implementation = name
    for part in model.modules():  # T5's stacks hold copies of the configuration, which their parent does not reach
        if arguments.is_hf(part) and cast(Any, part).config._attn_implementation != name:
            cast(Any, part).set_attn_implementation(name)


def _refused(choice: str, model: nn.Module) -> Refused:
    return Refused(f"attention: {choice} cannot serve {type(model).__name__}, whose attention cannot be exchanged for "
                   "it; write attention=auto")
