"""Precision: autocast, loss scaling, tf32, and weights kept in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tightfit.backends.pytorch.build import Build
from tightfit.techniques.precision import Bf16, Bf16Pure, Fp16, Fp32


def fp32(technique: Fp32, build: Build) -> Build:
    return _with_tf32(build, technique.tf32)


def fp16(technique: Fp16, build: Build) -> Build:
    build = replace(
        _with_autocast(build, torch.float16),
        loss_scaling=True,
        evaluation_dtype=torch.float16 if technique.full_eval else None,
    )
    return _with_tf32(build, technique.tf32)


def bf16(technique: Bf16, build: Build) -> Build:
    build = replace(
        _with_autocast(build, torch.bfloat16),
        evaluation_dtype=torch.bfloat16 if technique.full_eval else None,
    )
    return _with_tf32(build, technique.tf32)


def bf16_pure(technique: Bf16Pure, build: Build) -> Build:
    """Weights in bf16; how their updates round is the optimizer's part. Buffers, such as the frequencies of rotary
    positions, keep their format: rounding those would shift every position."""
    for parameter in build.model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return build


def _with_autocast(build: Build, dtype: torch.dtype) -> Build:
    kind = build.torch_device.type
    return replace(build, forward_contexts=(*build.forward_contexts, partial(torch.autocast, kind, dtype=dtype)))


def _with_tf32(build: Build, allowed: bool) -> Build:
    if build.torch_device.type != "cuda":
        return build
    return replace(build, settings=(*build.settings, partial(_fp32_products, "tf32" if allowed else "ieee")))


@contextmanager
def _fp32_products(precision: str) -> Iterator[None]:
    """How fp32 matrix products and convolutions compute, on CUDA, while this is entered."""
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv"))  # noqa: B009
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = precision
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
