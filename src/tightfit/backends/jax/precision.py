"""Precision: what products are computed in. Weights, norms and losses stay in fp32."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from tightfit.backends.jax.build import Build
from tightfit.techniques.precision import Bf16, Fp32


def fp32(technique: Fp32, build: Build) -> Build:
    # Left alone, XLA would take tf32 for products on the GPUs that have it.
    return replace(build, matmul_precision="tensorfloat32" if technique.tf32 else "float32")


def bf16(technique: Bf16, build: Build) -> Build:
    return replace(build, compute_dtype=jnp.bfloat16)
