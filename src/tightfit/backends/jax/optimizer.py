"""The optimizers, from optax: which parameters decay, and how the learning rate scales a step.

What `learning_rate` means is what it means in the PyTorch backend; so is which weights decay: matrices alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tightfit.backends.jax.build import Build, Optimizer
from tightfit.backends.jax.network import Params, is_stacked, rank
from tightfit.backends.jax.rounding import in_bf16, narrowed, widened
from tightfit.techniques import optimizer as declared
from tightfit.techniques.precision import Rounding

ADAFACTOR_USUAL_RATE = 1e-2
"""The relative step of the paper."""
ADAFACTOR_EPS = (1e-30, 1e-3)
"""The paper's floors, on squared gradients and on a tensor's scale."""


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
        found, fresh = adam.update(updates, widened(state), params)
        return found, narrowed(fresh, state)

    return _with(build, optax.GradientTransformation(init, update), technique.weight_decay)


def lion(technique: declared.Lion, build: Build) -> Build:
    b1, b2 = technique.betas
    return _with(build, optax.scale_by_lion(b1=b1, b2=b2), technique.weight_decay)


def sgd(technique: declared.Sgd, build: Build) -> Build:
    """Decay is added to the gradient, in front of the velocity."""
    velocity = optax.trace(decay=technique.momentum) if technique.momentum else optax.identity()
    decayed = optax.add_decayed_weights(technique.weight_decay, mask=decays)
    return _with(build, optax.chain(decayed, velocity), 0.0)


def adafactor(technique: declared.Adafactor, build: Build) -> Build:
    """A step is bounded relative to each layer's own tensors, so stacked layers are updated side by side, not as one.
    """
    rate = build.recipe.learning_rate
    if rate < ADAFACTOR_USUAL_RATE / 10:
        note = (f"adafactor's learning rate is relative to the size of the weights: {ADAFACTOR_USUAL_RATE:g} is "
                f"usual, and learning_rate is {rate:g}")
        build = replace(build, notes=(*build.notes, note))
    relative = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=1, epsilon=ADAFACTOR_EPS[0]),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(ADAFACTOR_EPS[1]),
    )
    by_layer = optax.GradientTransformation(jax.vmap(relative.init), jax.vmap(relative.update))
    either = optax.multi_transform({"stacked": by_layer, "single": relative}, _stacked_or_single)
    return _with(build, optax.chain(either, _bounded_by_age()), technique.weight_decay, scaled=False)


def decays(params: Params) -> dict[str, bool]:
    """Which parameters decay: no biases, no vectors."""
    return {name: rank(name, array) >= 2 and not name.endswith(".bias") for name, array in params.items()}


def _with(build: Build, direction: Any, weight_decay: float, scaled: bool = True) -> Build:
    """The optimizer that goes against `direction`, and decays weights by the learning rate times `weight_decay`.

    scaled: whether the direction is still to be multiplied by the learning rate; otherwise it takes it as an argument.
    """
    taking_rate = optax.with_extra_args_support(direction)

    def update(gradients: Params, state: Any, params: Params, learning_rate: jax.Array) -> tuple[Params, Any]:
        found, state = taking_rate.update(gradients, state, params, learning_rate=learning_rate)
        decaying = decays(params)
        fresh = {}
        for name, weight in params.items():
            step = learning_rate * found[name] if scaled else found[name]
            if weight_decay and decaying[name]:
                step = step + learning_rate * weight_decay * weight
            fresh[name] = (weight - step).astype(weight.dtype)
        return fresh, state

    made, rounding = Optimizer(direction.init, update), _weight_rounding(build)
    return replace(build, optimizer=made if rounding is None else in_bf16(made, rounding))


def _weight_rounding(build: Build) -> Rounding | None:
    assert build.recipe.precision != "auto", "resolve the recipe first"
    return build.recipe.precision.weight_rounding


def _bounded_by_age() -> Any:
    """Steps of the learning rate, at most one over the root of their number: Adafactor's."""

    def init(params: Params) -> jax.Array:
        return jnp.int32(0)

    def update(
        updates: Params, state: jax.Array, params: Params | None = None, *, learning_rate: jax.Array, **others: Any
    ) -> tuple[Params, jax.Array]:
        bound = jnp.minimum(learning_rate, jax.lax.rsqrt(jnp.float32(state + 1)))
        return jax.tree.map(lambda u: bound * u, updates), state + 1

    return optax.GradientTransformationExtraArgs(init, update)


def _stacked_or_single(params: Params) -> dict[str, str]:
    """Which arrays hold every layer's."""
    return {name: "stacked" if is_stacked(name) else "single" for name in params}
