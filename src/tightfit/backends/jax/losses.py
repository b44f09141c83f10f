"""Each task's loss, from the logits: a sum over the labels that count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tightfit.tasks import IGNORE


def cross_entropy_sum(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Summed cross-entropy, in the logits' format.

    logits: (..., classes), at least fp32. labels: int32 (...), `IGNORE` where nothing counts. Returns a scalar.
    """
    counts = labels != IGNORE
    # Picked out by comparing, for the gradient of a lookup is an array of logits more.
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    of_label = jnp.where(classes == labels[..., None], logits, 0.0).sum(-1)
    return jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - of_label, 0.0).sum()
