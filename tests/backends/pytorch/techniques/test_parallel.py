"""The step on several devices: a copy of the model does what the model does."""

from __future__ import annotations

import pytest
import torch

from tests.built import built, global_batches_of
from tightfit.backends.pytorch.batch import tensor_global_batch
from tightfit.backends.pytorch.techniques.parallel import LossModule


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """A copy such as DataParallel makes for a GPU: its weights are tensors and no parameters."""
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}
    weights = {parameter: parameter.clone() for parameter in module.parameters()}
    for part, copy in copies.items():
        for name, child in part.named_children():
            setattr(copy, name, copies[child])
        for name, parameter in part._parameters.items():
            setattr(copy, name, None if parameter is None else weights[parameter])
    return copies[module]


IMAGES = {"model": "vit-base", "task": "image-classification", "num_labels": 4, "vocab_size": None,
          "model_overrides": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "image_size": 32,
                              "intermediate_size": 64, "hidden_dropout_prob": 0.0}}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, IMAGES], ids=["gpt2", "vit"])
def test_a_copy_of_the_model_has_the_models_loss_and_gradients(tiny, changes):
    build = built({**tiny, **changes})
    batch = vars(tensor_global_batch(global_batches_of(build).global_batch(0)).micro_batches[0])
    losses, gradients = [], []
    for module in (LossModule(build), copied(LossModule(build))):
        loss = module(**batch).sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in build.model.parameters() if p.grad is not None])
        build.model.zero_grad()
    assert losses[0] == losses[1]
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
