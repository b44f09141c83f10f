"""Loss scaling: it changes no gradient, a step that overflows learns nothing, and the scale is part of a checkpoint."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.jax.cases import build, quickly
from tests.backends.jax.test_step import micro_batch
from tightfit.backends.jax.loading import stack_micro_batches
from tightfit.backends.jax.step import Step
from tightfit.backends.jax.update import GROWTH_INTERVAL, global_batch_gradients, next_scaler, unscale
from tightfit.tasks import global_batch_of


@pytest.fixture
def made():
    return build(precision="fp16", max_grad_norm=0.0, model_overrides={"num_layers": 1})


def global_batch(made):
    return stack_micro_batches(global_batch_of((micro_batch(2), micro_batch(2))), 2, made.rows)


def test_scaled_gradients_are_those_of_the_loss(made):
    step, given = Step(made), global_batch(made)
    arrays, count = step._device_put(given), jnp.int32(given.count)
    run = partial(global_batch_gradients, made)
    _, plain = quickly(lambda p, a: run(p, a, count, None), step.state["params"], arrays)
    _, scaled = quickly(lambda p, a: run(p, a, count, None, jnp.float32(1024)), step.state["params"], arrays)
    found, finite = unscale(scaled, {"scale": jnp.float32(1024), "steps": jnp.int32(0)})
    assert finite
    for name, gradient in plain.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0.05, atol=2e-3, err_msg=name)


def test_a_step_that_overflows_changes_nothing_but_the_scale(made, tmp_path):
    step = Step(made)
    given = global_batch(made)
    assert not step(given, 1e-2).read().skipped
    step.state["scaler"]["scale"] = jax.device_put(jnp.float32(3e38), made.replicated)
    before = jax.device_get(step.state)
    assert step(given, 1e-2).read().skipped
    after = jax.device_get(step.state)
    for part in ("params", "optimizer"):
        for old, new in zip(jax.tree.leaves(before[part]), jax.tree.leaves(after[part]), strict=True):
            np.testing.assert_array_equal(old, new)
    assert after["scaler"]["scale"] == pytest.approx(1.5e38)
    assert after["step"] == before["step"] + 1

    again = Step(made)
    again.load(tmp_path, step.save(tmp_path))
    assert jax.device_get(again.state["scaler"]) == after["scaler"]


def test_the_scale_grows_after_many_good_steps_in_a_row():
    scaler = {"scale": jnp.float32(8), "steps": jnp.int32(GROWTH_INTERVAL - 2)}
    scaler = next_scaler(scaler, jnp.bool_(True))
    assert (float(scaler["scale"]), int(scaler["steps"])) == (8, GROWTH_INTERVAL - 1)
    scaler = next_scaler(scaler, jnp.bool_(True))
    assert (float(scaler["scale"]), int(scaler["steps"])) == (16, 0)
    scaler = next_scaler({"scale": jnp.float32(8), "steps": jnp.int32(5)}, jnp.bool_(False))
    assert (float(scaler["scale"]), int(scaler["steps"])) == (4, 0)
