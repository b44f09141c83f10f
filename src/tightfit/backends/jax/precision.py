"""Precision: what products are computed in, and what weights are kept in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from tightfit.backends.jax.build import Build
from tightfit.techniques.precision import Bf16, Bf16Pure, Fp16, Fp32, Precision

CHOICES: dict[type[Precision], dict[str, Any]] = {
    Fp32: {},
    Fp16: {"compute_dtype": jnp.float16, "loss_scaling": True},
    Bf16: {"compute_dtype": jnp.bfloat16},
    Bf16Pure: {"compute_dtype": jnp.bfloat16, "weight_dtype": jnp.bfloat16},
}
"""Fields of the build. fp16 and bf16 cast fp32 weights where they are used; norms and losses stay in fp32."""


def precision(technique: Precision, build: Build) -> Build:
    made = replace(build, **CHOICES[type(technique)])
    if isinstance(technique, Fp32):  # left alone, XLA would take tf32 for products on the GPUs that have it
        return replace(made, matmul_precision="tensorfloat32" if technique.tf32 else "float32")
    return made
