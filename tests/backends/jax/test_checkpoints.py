"""Checkpoints: every optimizer's state comes back to the last bit, and another recipe's is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.backends.jax.cases import build
from tightfit.backends.jax.checkpoints import OPTIMIZER_FILE, WEIGHTS_FILE
from tightfit.backends.jax.step import Step
from tightfit.errors import CheckpointError


def scrambled(step: Step) -> Step:
    """The step with other numbers in its state."""
    random = np.random.default_rng(0)

    def other(leaf):
        values = random.integers(0, 9, leaf.shape) if leaf.dtype.kind in "iu" else random.normal(size=leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    step.state = jax.tree.map(other, step.state)
    return step


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", {"name": "sgd", "momentum": 0.0}], ids=str)
def test_a_state_comes_back(optimizer, tmp_path):
    step, fresh = scrambled(Step(build(optimizer=optimizer))), Step(build(optimizer=optimizer))
    fresh.load(tmp_path, step.save(tmp_path))
    assert jax.tree.structure(step.state) == jax.tree.structure(fresh.state)
    for saved, loaded in zip(jax.tree.leaves(step.state), jax.tree.leaves(fresh.state), strict=True):
        assert saved.dtype == loaded.dtype
        assert np.array_equal(saved, loaded)
        assert saved.sharding == loaded.sharding


def test_weights_have_the_names_and_shapes_of_pytorchs(tmp_path):
    step = Step(build())
    step.save(tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    assert weights["layers.2.mlp.input_layer.weight"].shape == (64, 16)
    assert "optimizer/mu/layers.*.mlp.input_layer.weight" in load_file(tmp_path / OPTIMIZER_FILE)


def test_another_recipes_checkpoint_is_told(tmp_path):
    step = Step(build())
    meta = step.save(tmp_path)
    with pytest.raises(CheckpointError, match="optimizer state is another recipe's"):
        Step(build(optimizer="sgd")).load(tmp_path, meta)
    with pytest.raises(CheckpointError, match=r"weights is another recipe's; .*layers\.2"):
        Step(build(model_overrides={"num_layers": 2})).load(tmp_path, meta)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError):
        step.load(tmp_path, meta)
