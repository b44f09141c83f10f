"""Weights in bf16: small updates are not lost, states have the formats that were asked for, and a run can go on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.jax.cases import build, quickly
from tightfit.backends.jax.build import Optimizer
from tightfit.backends.jax.checkpoints import load_state, save_state
from tightfit.backends.jax.optimizer import with_bf16_weights
from tightfit.backends.jax.update import abstract_state, initial_state

PLAIN = Optimizer(lambda params: (), lambda gradients, state, params, rate: (
    {name: params[name] - rate * gradients[name] for name in params}, state))  # fmt: skip


@pytest.mark.parametrize(("rounding", "expected", "within"), [
    ("nearest", 1.0, 0.0), ("kahan", 0.98, 0.004), ("stochastic", 0.98, 0.004),
])  # fmt: skip
def test_updates_below_the_last_bit_add_up(rounding, expected, within):
    """With all of XLA's optimizations, which must not keep more digits than bf16 has."""
    optimizer = with_bf16_weights(PLAIN, rounding)
    params = {"w": jnp.ones(1024, jnp.bfloat16)}
    gradients = {"w": jnp.full(1024, 1e-4, jnp.bfloat16)}

    @jax.jit
    def many(params, state):
        return jax.lax.fori_loop(0, 200, lambda _, c: optimizer.update(gradients, c[1], c[0], 1.0), (params, state))

    fresh, _ = many(params, optimizer.init(params))
    assert fresh["w"].dtype == jnp.bfloat16
    assert float(fresh["w"].astype(jnp.float32).mean()) == pytest.approx(expected, abs=within)


def test_what_is_no_number_stays_none_under_random_rounding():
    optimizer = with_bf16_weights(PLAIN, "stochastic")
    params = {"w": jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0], jnp.bfloat16)}
    fresh, _ = optimizer.update({"w": jnp.zeros(4, jnp.bfloat16)}, optimizer.init(params), params, 1.0)
    np.testing.assert_array_equal(np.asarray(fresh["w"], np.float32), [np.inf, -np.inf, np.nan, 0.0])


@pytest.mark.parametrize(("changes", "formats"), [
    ({"precision": "bf16-pure"}, {"bfloat16"}),
    ({"precision": {"name": "bf16-pure", "rounding": "stochastic"}}, {"bfloat16"}),
    ({"optimizer": {"name": "adamw-anyprecision", "variance": "fp32"}}, {"bfloat16", "float32"}),
], ids=("kahan", "stochastic", "anyprecision"))  # fmt: skip
def test_states_have_their_formats_and_are_saved_and_restored(tmp_path, changes, formats):
    made = build(**changes)
    state = quickly(lambda key: initial_state(made, key), jnp.zeros(2, jnp.uint32))
    kept = [array for array in jax.tree.leaves(state["optimizer"]) if jnp.issubdtype(array.dtype, jnp.floating)]
    assert {str(array.dtype) for array in kept} == formats
    save_state(made.network, state, tmp_path)
    again = load_state(made.network, abstract_state(made), tmp_path)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
