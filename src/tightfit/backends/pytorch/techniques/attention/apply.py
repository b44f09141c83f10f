"""Which attention function a model calls, which masks it is given, and which SDPA kernels may run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.formats import HALF
from tightfit.backends.pytorch.techniques.attention import arguments
from tightfit.backends.pytorch.techniques.attention.functions import EAGER, FLEX, SDPA, register
from tightfit.errors import Refused
from tightfit.techniques.attention import Eager, FlashAttn, Flex, Sdpa

KERNELS = {
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
    return _its_own(build)


def sdpa(technique: Sdpa, build: Build) -> Build:
    """Our SDPA function, and the named kernel alone while steps run. Where SDPA cannot serve the model, a named
    kernel is refused; `auto` falls back and says so."""
    style, special = arguments.attention_style(build.model), arguments.needs_eager(build.model)
    if technique.kernel == "auto":
        if style == "own":
            return _its_own(build, f"attention: {type(build.model).__name__} computes attention itself; that is kept")
        if special:
            return _ours(EAGER, build, f"attention: this model's {special} need eager attention, which is used")
        return _ours(SDPA, build, *_dense_note(technique, build))
    if special:
        raise Refused(f"attention.kernel: {technique.kernel!r} cannot serve this model's {special}; "
                      "write attention=eager")
    if style == "own":
        raise _refused(f"sdpa with the {technique.kernel} kernel", build.model)
    dropout = arguments.attention_dropout(build.model)
    if technique.kernel == "flash" and build.device.kind == "cpu" and dropout is not None:
        raise Refused(f"attention.kernel: the CPU's flash kernel has no dropout; write model_overrides.{dropout}=0 or "
                      "attention.kernel=auto")
    ours = _ours(SDPA, build, *_dense_note(technique, build))
    return replace(ours, settings=(*ours.settings, partial(sdpa_kernel, [KERNELS[technique.kernel]])))


def _dense_note(technique: Sdpa, build: Build) -> tuple[str, ...]:
    """A sentence where, on CUDA, packed documents will cost SDPA a T x T mask: see `kernels.packed_way`."""
    if build.device.kind != "cuda" or not (build.task.packs and build.recipe.data.packing):
        return ()
    costly = "attention: packed documents are kept apart by a mask of seq_len x seq_len"
    if not build.device.at_least(8):
        name = build.device.name
        return (f"{costly}: the {name} has no variable-length kernel; write data.packing=false or attention=flex",)
    dropout = arguments.attention_dropout(build.model)
    whole = build.recipe.precision != "auto" and build.recipe.precision.name == "fp32"
    wide = whole and not any(p.dtype in HALF for p in build.model.parameters())
    reasons = {
        "fp32 has no variable-length kernel; write precision=bf16 or attention=flex": wide,
        "the variable-length kernel is the flash one; write attention.kernel=auto":
            technique.kernel not in ("auto", "flash"),
        f"the variable-length kernel has no dropout; write model_overrides.{dropout}=0": dropout is not None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return (f"{costly}: {'; '.join(found)}",) if found else ()


def flex(technique: Flex, build: Build) -> Build:
    """Our FlexAttention function."""
    if arguments.attention_style(build.model) == "own" or arguments.has_sinks(build.model):
        raise _refused("flex", build.model)
    return _ours(FLEX, build)


def flash_attn(technique: FlashAttn, build: Build) -> Build:
    """The flash-attn library, as transformers calls it."""
    model = build.model
    unserved = arguments.attention_style(model) == "own" or arguments.has_sinks(model)
    if unserved or not getattr(model, "_supports_flash_attn", False):
        raise _refused("flash-attn", model)
    _call("flash_attention_2", model)
    causal = arguments.is_causal_model(model)
    masks = arguments.mask_arguments(model, arguments.flash_arguments(model), causal, arguments.flash_obstacle(model))
    return replace(build, mask_arguments=masks)


def _ours(name: str, build: Build, *notes: str) -> Build:
    """The model calls our function of that name."""
    register()
    model = build.model
    _call(name, model)
    causal, obstacle = arguments.is_causal_model(model), None
    masks: arguments.Arguments
    if arguments.attention_style(model) == "patterns":
        masks, obstacle = arguments.padding_arguments, arguments.pattern_obstacle(model)
    elif name == FLEX:
        masks = arguments.block_arguments(model, causal)
    else:
        masks = arguments.typed_arguments(model)
    masks = arguments.mask_arguments(model, masks, causal, obstacle)
    return replace(build, mask_arguments=masks, notes=(*build.notes, *notes))


def _its_own(build: Build, *notes: str) -> Build:
    """The model keeps its own attention and is given masks in the ordinary way."""
    model, causal = build.model, build.task.name == "causal-lm"
    own = arguments.own_arguments(model, causal)
    masks = arguments.mask_arguments(model, own, causal, arguments.own_obstacle(model))
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
