"""The bundled transformer in JAX: its size, and the same logits and losses as the PyTorch one with the same weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from tests.backends.jax.cases import SCANNED, UNROLLED, build, quickly, recipe
from tightfit.backends.jax.decoders import network_of
from tightfit.backends.jax.forward import logits
from tightfit.backends.jax.loading import stack_micro_batches
from tightfit.backends.jax.step import Step
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import tensor_global_batch
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.model_facts import model_facts
from tightfit.models import TransformerConfig


def test_parameters_at_the_full_configuration():
    network = network_of(TransformerConfig(), "causal-lm")
    assert network.parameter_count == 155_877_376


def in_pytorch(step: Step) -> Transformer:
    """The PyTorch transformer with the step's weights."""
    model = Transformer(step.build.network.config)
    arrays = step.build.network.unstack_layers(jax.device_get(step.state["params"]))
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()}, strict=True)
    return model


@pytest.mark.parametrize("change", [
    {}, {"backend": UNROLLED}, {"attention": "eager"}, {"task": "masked-lm"},
    {"backend": {**SCANNED, "unroll": 2}},
], ids=str)
def test_logits_are_those_of_pytorch(change):
    step = Step(build(**change))
    ids = np.random.default_rng(0).integers(0, 64, (3, 8))
    theirs = in_pytorch(step).eval()(torch.tensor(ids)).logits
    ours = quickly(lambda params: logits(step.build, params, {"input_ids": ids}), step.state["params"])
    np.testing.assert_allclose(ours, theirs.detach(), atol=1e-5)


def test_fifty_steps_lose_what_they_lose_in_pytorch():
    ours = Step(build(batch_size=5, micro_batch_size=2))
    chosen = recipe(batch_size=5, micro_batch_size=2, backend="pytorch", accumulation="loop")
    backend = PytorchBackend()
    theirs = backend.step(backend.build(chosen, backend.device(chosen), in_pytorch(ours)))
    global_batches = GlobalBatchLoader(prepare(chosen, model_facts(chosen)).train, chosen)
    for number in range(50):
        global_batch = global_batches.global_batch(number)
        mine = ours(stack_micro_batches(global_batch, 3, 2), 3e-3).read()
        other = theirs(tensor_global_batch(global_batch), 3e-3).read()
        assert mine.loss.mean == pytest.approx(other.loss.mean, abs=1e-4), number
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    assert mine.loss.mean < 3.5
