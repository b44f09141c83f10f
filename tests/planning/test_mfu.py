"""Model FLOPs of a step."""

from __future__ import annotations

import pytest

from tightfit.backends.measurements import ModelSize
from tightfit.planning.mfu import model_flops
from tightfit.recipe import Recipe


def model_size(recipe: Recipe) -> ModelSize:
    """One whose attention takes a FLOP for each pair of positions, and all else 100 a token."""
    return ModelSize(active_parameters=1, parameters=1, flops=100 * recipe.seq_len + recipe.seq_len**2, values=0)


@pytest.mark.parametrize(("fields", "flops"), [
    ({}, 8 * 4 * (100 * 256 + 256**2)), ({"data": {"packing": False}}, 8 * (100 * 1024 + 1024**2)),
    ({"data": "dummy"}, 8 * (100 * 1024 + 1024**2)), ({"seq_len": 3}, 8 * 3 * (100 + 1)),
    ({"task": "sequence-classification"}, 8 * (100 * 1024 + 1024**2)),
])  # fmt: skip
def test_positions_of_other_documents_are_no_work_of_a_row(fields, flops):
    assert model_flops(model_size, Recipe.from_dict({"seq_len": 1024, "batch_size": 8, **fields})) == flops
