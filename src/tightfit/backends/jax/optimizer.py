"""The optimizers, from optax: which parameters decay, how the learning rate scales a step, and how weights kept in
bf16 are updated: in fp32, and rounded so that small updates are not lost.

What `learning_rate` means is what it means in the PyTorch backend; so is which weights decay: matrices alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tightfit.backends.jax.build import Build, Optimizer
from tightfit.backends.jax.network import Params, fold_in_name, is_stacked
from tightfit.techniques import optimizer as declared
from tightfit.techniques.precision import Rounding

ADAFACTOR_EPS = (1e-30, 1e-3)
"""The paper's floors, on squared gradients and on a tensor's scale."""
EXPONENT, MANTISSA = 8, 7
"""Bits of bfloat16."""


def adamw(technique: declared.AdamW, build: Build) -> Build:
    b1, b2 = technique.betas
    return _with(build, optax.scale_by_adam(b1=b1, b2=b2, eps=technique.eps), technique.weight_decay)


def adamw_anyprecision(technique: declared.AdamWAnyPrecision, build: Build) -> Build:
    """AdamW with its usual numbers, in fp32, its states kept in formats of their own."""
    usual, formats = declared.AdamW(), {"fp32": jnp.float32, "bf16": jnp.bfloat16}
    adam = optax.scale_by_adam(b1=usual.betas[0], b2=usual.betas[1], eps=usual.eps)

    def init(params: Params) -> Any:
        state = adam.init(params)
        mu, nu = (jax.tree.map(lambda a, kept=kept: a.astype(formats[kept]), tree)
                  for tree, kept in ((state.mu, technique.momentum), (state.nu, technique.variance)))  # fmt: skip
        return state._replace(mu=mu, nu=nu)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        found, fresh = adam.update(updates, _to_fp32(state), params)
        return found, _cast_like(fresh, state)

    return _with(build, optax.GradientTransformation(init, update), technique.weight_decay)


def lion(technique: declared.Lion, build: Build) -> Build:
    b1, b2 = technique.betas
    return _with(build, optax.scale_by_lion(b1=b1, b2=b2), technique.weight_decay)


def sgd(technique: declared.Sgd, build: Build) -> Build:
    """Decay is added to the gradient, in front of the velocity."""
    velocity = optax.trace(decay=technique.momentum) if technique.momentum else optax.identity()
    decayed = optax.add_decayed_weights(technique.weight_decay, mask=decay_mask)
    return _with(build, optax.chain(decayed, velocity), 0.0)


def adafactor(technique: declared.Adafactor, build: Build) -> Build:
    """A step is bounded relative to each layer's own tensors, so stacked layers are updated side by side, not as one.
    """
    build = replace(build, notes=(*build.notes, *technique.notes(build.recipe.learning_rate)))
    direction = [
        optax.scale_by_factored_rms(min_dim_size_to_factor=1, epsilon=ADAFACTOR_EPS[0]),
        optax.clip_by_block_rms(1.0),
    ]
    if technique.scale_parameter:
        direction.append(optax.scale_by_param_block_rms(ADAFACTOR_EPS[1]))
    each = optax.chain(*direction)
    by_layer = optax.GradientTransformation(jax.vmap(each.init), jax.vmap(each.update))
    either = optax.multi_transform({"stacked": by_layer, "single": each}, lambda params: {
        name: "stacked" if is_stacked(name) else "single" for name in params})
    if not technique.scale_parameter:
        return _with(build, either, technique.weight_decay)
    return _with(build, optax.chain(either, _scale_by_relative_step()), technique.weight_decay, scaled=False)


def decay_mask(params: Params) -> dict[str, bool]:
    """Parameters that decay: no biases, no vectors."""
    return {name: array.ndim - is_stacked(name) >= 2 and not name.endswith(".bias") for name, array in params.items()}


def _with(build: Build, direction: Any, weight_decay: float, scaled: bool = True) -> Build:
    """The optimizer that goes against `direction`, and decays weights by the learning rate times `weight_decay`.

    scaled: whether the direction is still to be multiplied by the learning rate; otherwise it takes it as an argument.
    """
    taking_rate = optax.with_extra_args_support(direction)

    def update(gradients: Params, state: Any, params: Params, learning_rate: jax.Array) -> tuple[Params, Any]:
        found, state = taking_rate.update(gradients, state, params, learning_rate=learning_rate)
        decaying = decay_mask(params)
        fresh = {}
        for name, weight in params.items():
            step = learning_rate * found[name] if scaled else found[name]
            if weight_decay and decaying[name]:
                step = step + learning_rate * weight_decay * weight
            fresh[name] = (weight - step).astype(weight.dtype)
        return fresh, state

    made, rounding = Optimizer(direction.init, update), build.recipe.weight_rounding
    return replace(build, optimizer=made if rounding is None else with_bf16_weights(made, rounding))


def _scale_by_relative_step() -> Any:
    """Steps of the learning rate, at most one over the root of their number: Adafactor's."""

    def init(params: Params) -> jax.Array:
        return jnp.int32(0)

    def update(
        updates: Params, state: jax.Array, params: Params | None = None, *, learning_rate: jax.Array, **others: Any
    ) -> tuple[Params, jax.Array]:
        bound = jnp.minimum(learning_rate, jax.lax.rsqrt(jnp.float32(state + 1)))
        return jax.tree.map(lambda u: bound * u, updates), state + 1

    return optax.GradientTransformationExtraArgs(init, update)


def with_bf16_weights(optimizer: Optimizer, rounding: Rounding) -> Optimizer:
    """An optimizer of fp32 weights as one of bf16 weights, whose states are kept in the formats that they begin in.

    Its state adds what the rounding needs: with `kahan` what each weight lost so far, with `stochastic` the number of
    updates, which its random numbers come from.
    """

    def init(params: Params) -> dict[str, Any]:
        begun: dict[str, Any] = {"states": optimizer.init(params)}
        if rounding == "kahan":
            begun["lost"] = {name: jnp.zeros_like(weight) for name, weight in params.items()}
        elif rounding == "stochastic":
            begun["updates"] = jnp.int32(0)
        return begun

    def update(
        gradients: Params, state: dict[str, Any], params: Params, learning_rate: jax.Array
    ) -> tuple[Params, dict[str, Any]]:
        weights = _to_fp32(params)
        if rounding == "kahan":
            weights = jax.tree.map(jnp.add, weights, _to_fp32(state["lost"]))
        fresh, states = optimizer.update(_to_fp32(gradients), _to_fp32(state["states"]), weights, learning_rate)
        found: dict[str, Any] = {"states": _cast_like(states, state["states"])}
        if rounding == "stochastic":
            found["updates"] = state["updates"] + 1
            key = jax.random.fold_in(jax.random.key(0), state["updates"])
            return {name: _stochastic_round(fold_in_name(key, name), weight) for name, weight in fresh.items()}, found
        # As fp32: a cast there and back XLA may leave out, and keep more digits than are asked.
        nearest = {name: jax.lax.reduce_precision(weight, EXPONENT, MANTISSA) for name, weight in fresh.items()}
        if rounding == "kahan":
            found["lost"] = {name: (fresh[name] - nearest[name]).astype(jnp.bfloat16) for name in fresh}
        return {name: weight.astype(jnp.bfloat16) for name, weight in nearest.items()}, found

    return Optimizer(init, update)


def _to_fp32(tree: Any) -> Any:
    """The tree with its bf16 arrays in fp32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)


def _cast_like(new: Any, old: Any) -> Any:
    """The new tree in the formats of the old one."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)


def _stochastic_round(key: jax.Array, weight: jax.Array) -> jax.Array:
    """Rounded up or down, each as likely as the other is far."""
    noise = jax.random.bits(key, weight.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint32) + noise
    cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(weight), cut, weight).astype(jnp.bfloat16)
