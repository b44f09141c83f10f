"""The training step as a pure function of its state and a global batch, and the abstract arguments to compile it
with."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from tightfit.backends.jax.build import Build
from tightfit.backends.jax.forward import loss_and_correct, loss_sum
from tightfit.backends.jax.loading import array_dtype
from tightfit.backends.jax.network import Params

State = dict[str, Any]
"""`params`; `optimizer`, its state; `key`, uint32 (2,), of the run's random numbers; `step`, int32."""
Arrays = dict[str, jax.Array]
Metrics = dict[str, Any]
"""`loss`: (sum, count); `grad_norm`: the norm before clipping, where gradients are clipped."""


def train_step(build: Build, state: State, global_batch: Arrays, count: jax.Array, learning_rate: jax.Array) -> tuple[
    State, Metrics
]:
    """One update from one global batch.

    The loss of a global batch is the sum over all its labels that count, divided by their number `count`, whatever the
    sizes of its micro-batches: each micro-batch adds its own sum over the global batch's count.
    """
    assert build.optimizer is not None
    params = state["params"]
    key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
    total, gradients = global_batch_gradients(build, params, global_batch, count, key)
    metrics: Metrics = {"loss": (total, count)}
    with jax.named_scope("optimizer"):
        if build.recipe.max_grad_norm:
            with jax.named_scope("clip"):
                gradients, metrics["grad_norm"] = clip_by_global_norm(gradients, build.recipe.max_grad_norm)
        params, optimizer = build.optimizer.update(gradients, state["optimizer"], params, learning_rate)
    return {"params": params, "optimizer": optimizer, "key": state["key"], "step": state["step"] + 1}, metrics


def global_batch_gradients(
    build: Build, params: Params, global_batch: Arrays, count: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, Params]:
    """A global batch's summed loss, and the gradients of its mean over `count` labels. key: of dropout."""
    assert build.sum_gradients is not None

    def share(params: Params, batch: Arrays, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = loss_sum(build, params, batch, None if key is None else jax.random.fold_in(key, number))
        return total / jnp.maximum(count, 1), total

    def compute(batch: Arrays, number: jax.Array) -> tuple[jax.Array, Params]:
        (_, total), gradients = jax.value_and_grad(share, has_aux=True)(params, batch, number)
        return total, gradients

    found: tuple[jax.Array, Params] = build.sum_gradients(compute, global_batch, global_batch["labels"].shape[0])
    return found


def eval_step(build: Build, params: Params, global_batch: Arrays) -> tuple[jax.Array, jax.Array]:
    """A global batch's summed loss, with nothing dropped, and how many labels have the largest logit."""
    losses, correct = jax.lax.map(lambda batch: loss_and_correct(build, params, batch), global_batch)
    return losses.sum(), correct.sum()


def clip_by_global_norm(gradients: Params, limit: float) -> tuple[Params, jax.Array]:
    """The gradients scaled down to a global norm of `limit`, if it is larger, and the norm before that."""
    norm = jnp.sqrt(sum(jnp.square(gradient).sum() for gradient in gradients.values()))
    scale = jnp.minimum(limit / (norm + 1e-6), 1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}, norm


def initial_state(build: Build, key: jax.Array, params: Params | None = None) -> State:
    """The state before the first step. params: weights that are there already; None draws them.

    key: uint32 (2,); weights and dropout take streams of their own from it.
    """
    assert build.optimizer is not None
    if params is None:
        params = build.network.init(jax.random.wrap_key_data(key))
    return {"params": params, "optimizer": build.optimizer.init(params), "key": key, "step": jnp.int32(0)}


def abstract_state(build: Build) -> State:
    """Shapes, formats and places of the state, as `jax.ShapeDtypeStruct`s."""
    found: State = jax.eval_shape(lambda: initial_state(build, jnp.zeros(2, jnp.uint32)))
    return cast(State, with_sharding(found, build.replicated))


def abstract_global_batch(build: Build) -> Arrays:
    """Shapes, formats and places of a full global batch's arrays: of text that shares rows, of text padded, or
    random."""
    data, task, names = build.recipe.data, build.task, ["input_ids", "labels"]
    if data.shares_rows(task):
        names += ["position_ids", "document_ids"]
    elif data.source != "dummy" and task.predicts != "next":
        names.append("padding")
    shape = (build.micro_batches, build.rows, build.recipe.seq_len)
    arrays = {name: jax.ShapeDtypeStruct(shape, array_dtype(name)) for name in names}
    return cast(Arrays, with_sharding(arrays, build.batch_sharding))


def with_sharding(tree: Any, sharding: Any) -> Any:
    """The tree's shapes and formats, on the sharding's devices."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def jitted_step(build: Build) -> Any:
    """The step as a function to compile for the build's devices: (state, global batch, count, learning rate)."""

    def step(state: State, global_batch: Arrays, count: jax.Array, learning_rate: jax.Array) -> tuple[State, Metrics]:
        return train_step(build, state, global_batch, count, learning_rate)

    return jax.jit(step, donate_argnums=0, out_shardings=build.replicated)  # the new state takes the old one's memory


def lower_step(build: Build) -> jax.stages.Lowered:
    """The step, lowered for the build's devices, which need not be present; no array is made. Compile it with
    `build.compiler_options`."""
    numbers = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32))
    lowered: jax.stages.Lowered = jitted_step(build).lower(
        abstract_state(build), abstract_global_batch(build), *with_sharding(numbers, build.replicated)
    )
    return lowered
