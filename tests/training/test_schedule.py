"""Our schedules are transformers' schedules."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from tightfit.recipe import Recipe
from tightfit.training.schedule import learning_rate


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial"])
def test_a_schedule_equals_transformers(kind, warmup):
    values = {"lr_scheduler_type": kind, "warmup_steps": warmup, "max_steps": 12, "learning_rate": 0.5}
    recipe = Recipe.from_dict(values)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=12)
    for step in range(12):
        assert learning_rate(recipe, step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        scheduler.step()
