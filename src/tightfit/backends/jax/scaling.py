"""Dynamic loss scaling, against the small range of fp16: gradients are of a loss multiplied by a number that grows
while they stay finite. Where they do not, the step changes nothing and the number shrinks. Figures as
torch.amp.GradScaler's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tightfit.backends.jax.network import Params

FIRST, GROWTH, BACKOFF = 65536.0, 2.0, 0.5
INTERVAL = 2000
"""Steps in a row with finite gradients after which the number grows."""

Scaler = dict[str, jax.Array]
"""`scale`, fp32; `steps`, int32, with finite gradients since it last changed."""


def begun() -> Scaler:
    return {"scale": jnp.float32(FIRST), "steps": jnp.int32(0)}


def unscaled(gradients: Params, scaler: Scaler) -> tuple[Params, jax.Array]:
    """The gradients of the loss itself, and whether all of them are finite."""
    found = {name: gradient / scaler["scale"] for name, gradient in gradients.items()}
    return found, jnp.stack([jnp.isfinite(gradient).all() for gradient in found.values()]).all()


def moved_on(scaler: Scaler, finite: jax.Array) -> Scaler:
    """The scaler behind a step."""
    steps = jnp.where(finite, scaler["steps"] + 1, 0)
    grows = steps >= INTERVAL
    scale = jnp.where(finite, jnp.where(grows, scaler["scale"] * GROWTH, scaler["scale"]), scaler["scale"] * BACKOFF)
    return {"scale": scale, "steps": jnp.where(grows, 0, steps)}


def kept_where(finite: jax.Array, new: Any, old: Any) -> Any:
    """The new tree, or the old one where gradients were not finite."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
