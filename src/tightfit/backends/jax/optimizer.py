"""The optimizers, from optax: which parameters decay, and how the learning rate scales a step.

What `learning_rate` means is what it means in the PyTorch backend; so is which weights decay: matrices alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import optax

from tightfit.backends.jax.build import Build, Optimizer
from tightfit.backends.jax.network import Params, is_stacked
from tightfit.techniques import optimizer as declared
from tightfit.techniques.muon import Muon


def adamw(technique: declared.AdamW, build: Build) -> Build:
    b1, b2 = technique.betas
    return _with(build, optax.scale_by_adam(b1=b1, b2=b2, eps=technique.eps), technique.weight_decay)


def sgd(technique: declared.Sgd, build: Build) -> Build:
    """Decay is added to the gradient, in front of the velocity."""
    velocity = optax.trace(decay=technique.momentum) if technique.momentum else optax.identity()
    decayed = optax.add_decayed_weights(technique.weight_decay, mask=decay_mask)
    return _with(build, optax.chain(decayed, velocity), 0.0)


def muon(technique: Muon, build: Build) -> Build:
    """Muon for the matrices of the layers, one by one, and Adam for the rest. optax makes matrices orthogonal in the
    weights' format, where torch does so in bf16, and corrects the momentum of the first steps."""
    kinds = {name: "matrix" if is_stacked(name) and len(shape) == 3 else "rest"
             for name, shape in build.network.shapes().items()}  # fmt: skip

    def sides(updates: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    orthogonal = optax.contrib.scale_by_muon(beta=technique.momentum, weight_dimension_numbers=sides)
    as_adam = optax.stateless_with_tree_map(lambda update, _: 0.2 * max(update.shape[-2:]) ** 0.5 * update)
    b1, b2 = technique.betas
    each = {"matrix": optax.chain(orthogonal, as_adam), "rest": optax.scale_by_adam(b1=b1, b2=b2)}
    return _with(build, optax.partition(each, kinds), technique.weight_decay)


def decay_mask(params: Params) -> dict[str, bool]:
    """Parameters that decay: no biases, no vectors."""
    return {name: array.ndim - is_stacked(name) >= 2 and not name.endswith(".bias") for name, array in params.items()}


def _with(build: Build, direction: Any, weight_decay: float) -> Build:
    """The optimizer that goes against `direction` times the learning rate, and decays weights by the learning rate
    times `weight_decay`."""

    def update(gradients: Params, state: Any, params: Params, learning_rate: jax.Array) -> tuple[Params, Any]:
        found, state = direction.update(gradients, state, params)
        decaying = decay_mask(params)
        fresh = {}
        for name, weight in params.items():
            step = learning_rate * found[name]
            if weight_decay and decaying[name]:
                step = step + learning_rate * weight_decay * weight
            fresh[name] = weight - step
        return fresh, state

    return replace(build, optimizer=Optimizer(direction.init, update))
