"""The bundled recipes by memory: what the record says, resolved, and they fit."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import tightfit
from tightfit.bundled import BUNDLED
from tightfit.devices import parse_memory
from tightfit.recipe import CHOICES
from tightfit.recipe_files import bundled_recipes, load_recipe

ROOT = Path(__file__).parent.parent
MODELS = json.loads((ROOT / "results" / "best_recipes.json").read_text())["models"]
BUDGETS = ("8GB", "12GB", "16GB", "24GB", "40GB", "80GB")


def test_every_bundled_model_has_an_answer_for_every_budget():
    assert list(MODELS) == list(BUNDLED)
    assert all(tuple(rows) == BUDGETS for rows in MODELS.values())


@pytest.mark.parametrize("model", BUNDLED)
def test_a_recipe_is_what_the_record_says(model):
    for budget, found in MODELS[model].items():
        name = f"{model}-{budget.lower()}"
        if found["recipe"] is None:
            assert name not in bundled_recipes()
            assert found["missing_bytes"] or found["refused"]
            continue
        assert yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text()) == found["recipe"]
        recipe = load_recipe(name, cuda=True)
        assert recipe.model == model
        assert "auto" not in [getattr(recipe, field) for field in CHOICES]
        assert found["used_bytes"] < parse_memory(budget)


@pytest.mark.parametrize("model", BUNDLED)
def test_more_memory_is_never_slower_on_the_same_kind_of_card(model):
    """A budget's card borrows the speed of a real one of about its size, so only like cards compare. What changes
    numerics is taken only where nothing else fits, and may be faster than what is taken where something does."""
    rows = [found for found in MODELS[model].values() if found["recipe"] is not None]
    for small, large in pairwise(rows):
        alike = small["device"].partition("(")[2] == large["device"].partition("(")[2]
        if alike and len(small["changes_numerics"]) <= len(large["changes_numerics"]):
            assert large["samples_per_second"] >= 0.98 * small["samples_per_second"]


def test_a_recipe_fits_its_card():
    plan = tightfit.plan(None, "gpt2-8gb", gpu_memory="8GB")
    assert plan.chosen is not None
    found = MODELS["gpt2"]["8GB"]
    assert plan.chosen.estimate.fits == "yes"
    assert plan.chosen.estimate.memory.used == pytest.approx(found["used_bytes"], rel=0.01)
    assert plan.chosen.estimate.time.tokens_per_second == pytest.approx(found["tokens_per_second"], rel=0.05)


def test_the_list_of_recipes_names_the_sizes_of_each_model():
    done = subprocess.run([sys.executable, "-m", "tightfit", "recipes"], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["gpt2"]]
    assert line.split()[2:] == ["8gb", "12gb", "16gb", "24gb", "40gb", "80gb"]
