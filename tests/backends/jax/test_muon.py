"""Muon in JAX beside torch's: the same matrices, and steps that differ as fp32 does from bf16."""

from __future__ import annotations

import jax
import numpy as np
import torch

from tests.backends.jax.cases import build
from tightfit.backends.jax.network import is_stacked

RATE = 1e-2


def test_layers_matrices_move_as_torchs_do_and_the_rest_as_adam():
    step = build(optimizer={"name": "muon", "momentum": 0.9, "weight_decay": 0.1})
    before = step.network.init(jax.random.key(0))
    random = np.random.default_rng(0)
    gradients = {name: random.normal(size=array.shape).astype(np.float32) for name, array in before.items()}
    assert step.optimizer is not None
    after, _ = step.optimizer.update(gradients, step.optimizer.init(before), before, RATE)
    plain, _ = (adamw := build(optimizer={"name": "adamw", "weight_decay": 0.1}).optimizer).update(
        gradients, adamw.init(before), before, RATE)
    matrices = {name for name, array in before.items() if is_stacked(name) and array.ndim == 3}
    assert len(matrices) == 4
    for name, array in before.items():
        if name not in matrices:
            np.testing.assert_allclose(after[name], plain[name], rtol=1e-6)
            continue
        weights = [torch.tensor(np.array(layer)) for layer in array]
        for weight, gradient in zip(weights, gradients[name], strict=True):
            weight.grad = torch.tensor(gradient)
        torch.optim.Muon(weights, lr=RATE, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw").step()
        ours, theirs = np.array(after[name] - array), np.stack([w.numpy() for w in weights]) - np.array(array)
        assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()
