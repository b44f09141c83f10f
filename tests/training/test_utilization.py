"""Model FLOPs utilization of a run's steps."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.backends.measurements import ModelSize
from tightfit.devices import Device, find_device
from tightfit.recipe import Recipe
from tightfit.training.session import Session


class Sized:
    """A backend that knows a model's size."""

    def model_size(self, recipe: Recipe, config: Any = None) -> ModelSize:
        return ModelSize(active_parameters=1, parameters=1, flops=10**7 * recipe.seq_len, values=0)


@pytest.mark.parametrize(("task", "model", "a_sample"), [
    ("causal-lm", "gpt2", 100), ("image-classification", "vit-base", 1)])
def test_mfu_is_model_flops_over_the_cards_peak(task, model, a_sample):
    recipe = Recipe.from_dict({"precision": "bf16", "seq_len": 100, "batch_size": 8, "task": task, "model": model})
    device = Device(kind="cuda", name="NVIDIA GeForce RTX 4090", memory_bytes=2**34)
    backend: Any = Sized()
    mfu = Session(recipe=recipe, device=device, backend=backend).utilization()
    assert mfu is not None
    assert mfu(1000.0) == pytest.approx(1000.0 * 1e9 / a_sample / find_device("rtx-4090").peak("bfloat16"))
    for other in (Device(kind="cuda", name="a card of tomorrow", memory_bytes=2**34),
                  Device(kind="cpu", name="CPU", memory_bytes=2**34)):
        assert Session(recipe=recipe, device=other, backend=backend).utilization() is None
