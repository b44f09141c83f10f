"""Our schedules are transformers' schedules."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from tightfit.errors import RecipeError
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import as_recipe
from tightfit.recipe.sections import SCHEDULE_ARGUMENTS, Schedule
from tightfit.recipe.yaml_text import to_yaml
from tightfit.training.schedule import learning_rate

CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in get_args(Schedule) if kind not in ("cosine_with_min_lr", "warmup_stable_decay")),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 0.05}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1}),
    ("polynomial", {"lr_end": 0.01, "power": 2.0}),
    ("warmup_stable_decay", {"num_decay_steps": 4}),
    ("warmup_stable_decay", {"num_decay_steps": 12, "min_lr_ratio": 0.1, "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 3, "num_stable_steps": 2, "min_lr_ratio": 0.1, "num_cycles": 0.7}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 0, "warmup_type": "1-sqrt", "min_lr_ratio": 0.3}),
]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(("kind", "arguments"), CASES)
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_a_schedule_equals_transformers(kind, arguments, warmup):
    values = {"lr_scheduler_type": kind, "warmup_steps": warmup, "max_steps": 12, "learning_rate": 0.5,
              "lr_scheduler_kwargs": arguments}
    recipe = Recipe.from_dict(values)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=12,
                              scheduler_specific_kwargs=arguments)
    for step in range(12):
        assert learning_rate(recipe, step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        scheduler.step()


def test_every_argument_of_a_schedule_is_compared():
    compared = {kind: {name for each, arguments in CASES if each == kind for name in arguments} for kind, _ in CASES}
    assert {kind: names for kind, names in compared.items() if names} == {
        kind: set(names) for kind, names in SCHEDULE_ARGUMENTS.items()}


@pytest.mark.parametrize(("kind", "arguments", "words"), [
    ("cosine", {"min_lr": 0.1}, "kwargs.min_lr: cosine has no such argument; choose from: num_cycles"),
    ("linear", {"num_cycles": 1}, "kwargs.num_cycles: linear has no such argument; leave it out"),
    ("cosine_with_restarts", {"num_cycle": 1}, "did you mean 'num_cycles'"),
    ("cosine_with_restarts", {"num_cycles": "two"}, "kwargs.num_cycles: 'two' should be a number from 0 to 1e.18"),
    ("cosine_with_restarts", {"num_cycles": -1}, "kwargs.num_cycles: -1 should be a number from 0 to 1e.18"),
    ("cosine_with_min_lr", {"min_lr": 1e39}, "kwargs.min_lr: 1e.39 should be a number from 0 to 1e.18"),
    ("cosine_with_min_lr", {}, "takes one of min_lr and min_lr_rate, and {} holds none; write lr_scheduler_kwargs="),
    ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0}, "holds both; write lr_scheduler_kwargs="),
    ("warmup_stable_decay", {"min_lr_ratio": 0.1}, "takes num_decay_steps, and .* holds none; write lr_scheduler_kwar"),
    ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "sqrt"}, "decay_type: 'sqrt' is not known"),
])  # fmt: skip
def test_arguments_that_a_schedule_does_not_take_are_named(kind, arguments, words):
    with pytest.raises(RecipeError, match=words):
        Recipe.from_dict({"lr_scheduler_type": kind, "lr_scheduler_kwargs": arguments})


def test_a_schedules_arguments_are_written_on_the_command_line_and_kept_in_files(tmp_path):
    words = ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs.min_lr_rate=0.1"]
    recipe = as_recipe("quickstart", None, words)
    assert recipe.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe.to_dict()))
    assert as_recipe(tmp_path / "recipe.yaml") == recipe
