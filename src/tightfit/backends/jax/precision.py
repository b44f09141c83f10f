"""Precision: what products are computed in, and what weights are kept in."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from tightfit.backends.jax.build import Build
from tightfit.techniques.precision import Bf16, Bf16Pure, Fp16, Fp32


def fp32(technique: Fp32, build: Build) -> Build:
    """Everything in fp32. Left alone, XLA would take tf32 for products on the GPUs that have it."""
    return replace(build, matmul_precision="tensorfloat32" if technique.tf32 else "float32")


def fp16(technique: Fp16, build: Build) -> Build:
    """fp32 weights, cast where they are used; norms and losses stay in fp32; the loss is scaled."""
    return replace(build, compute_dtype=jnp.float16, loss_scaling=True)


def bf16(technique: Bf16, build: Build) -> Build:
    """fp32 weights, cast where they are used; norms and losses stay in fp32."""
    return replace(build, compute_dtype=jnp.bfloat16)


def bf16_pure(technique: Bf16Pure, build: Build) -> Build:
    """Weights in bf16 too, and with them gradients and states; see `rounding` for how they are updated."""
    return replace(build, compute_dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
