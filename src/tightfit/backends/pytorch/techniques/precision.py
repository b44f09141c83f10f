"""Precision: autocast, loss scaling, tf32, weights kept in bf16, and products in fp8."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from tightfit.backends.pytorch.build import Build
from tightfit.errors import ModelError, Refused
from tightfit.techniques.precision import Bf16, Fp8, Fp16, Fp32, Precision


def fp32(technique: Fp32, build: Build) -> Build:
    return _with_tf32(build, technique.tf32)


def mixed(technique: Fp16 | Bf16, build: Build) -> Build:
    """Autocast, and for fp16 loss scaling."""
    dtype = getattr(torch, technique.computes_in)
    build = replace(
        _with_autocast(build, dtype), loss_scaling=technique.loss_scaling,
        evaluation_dtype=dtype if technique.full_eval else None,
    )
    if technique.loss_scaling and build.device.kind == "cpu":
        slow = "precision: most processors compute fp16 slowly, by way of fp32; write precision=bf16 or fp32"
        build = replace(build, notes=(*build.notes, slow))
    return _with_tf32(build, technique.tf32)


def fp8(technique: Fp8, build: Build) -> Build:
    """Products of the blocks' linear layers in fp8, and autocast for the rest where weights are fp32."""
    try:  # here, for torchao takes a second to import, and does not promise to keep its inner parts
        from tightfit.backends.pytorch.techniques import fp8_layers
    except ImportError as error:
        raise ModelError(f"precision: this version of torchao lacks what fp8 needs: {error}; write precision=bf16, or "
                         "run: pip install 'torchao>=0.17'") from error
    converted, left_out = fp8_layers.convert(build.blocks, technique.scaling, emulated=build.device.kind == "cpu")
    if not converted:
        raise Refused("precision: fp8 multiplies in linear layers whose sides are multiples of 16, and the blocks of "
                      f"{type(build.model).__name__} have none; write precision=bf16")
    notes = {
        f"precision: {left_out} of {converted + left_out} linear layers of the blocks have a side that is no multiple "
        "of 16, and stay in bf16": left_out,
        "precision: a processor has no fp8 products and emulates them in fp32; write precision=bf16 to train on it":
            build.device.kind == "cpu",
        "precision: uncompiled, fp8's casts take longer than its products save; write compile=per-block":
            build.device.kind == "cuda" and not build.recipe.compiled,
    }
    build = replace(build, notes=(*build.notes, *(note for note, holds in notes.items() if holds)))
    return _with_autocast(build, torch.bfloat16) if technique.autocast else build


def _with_autocast(build: Build, dtype: torch.dtype) -> Build:
    autocast = partial(torch.autocast, build.torch_device.type, dtype=dtype)
    return replace(build, forward_contexts=(*build.forward_contexts, autocast))


def weight_dtype(precision: Precision | Literal["auto"]) -> torch.dtype:
    """The weights' format, in which the model is built."""
    return torch.float32 if precision == "auto" or precision.weight_rounding is None else torch.bfloat16


def _with_tf32(build: Build, allowed: bool) -> Build:
    if build.torch_device.type != "cuda":
        return build
    return replace(build, settings=(*build.settings, partial(fp32_products, allowed)))


@contextmanager
def fp32_products(tf32: bool) -> Iterator[None]:
    """Precision of CUDA's fp32 matrix products, convolutions and recurrent layers while this is entered.

    torch keeps older, process-wide flags next to a setting for each operator, and reading a flag raises where the two
    disagree, as Inductor does when it tunes: so both are set, and both put back.
    """
    cudnn: Any = torch.backends.cudnn
    operators = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [operator.fp32_precision for operator in operators]
    try:
        flags = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # the operators' own settings were in use
        flags = "highest", True
    _set_flags("high" if tf32 else "highest", tf32)
    for operator in operators:
        operator.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        _set_flags(*flags)
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision


def _set_flags(products: str, convolutions: bool) -> None:
    with warnings.catch_warnings():  # some versions of torch advise against these flags, which Inductor reads
        warnings.filterwarnings("ignore", message=".*(TF32|fp32_precision)")
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
