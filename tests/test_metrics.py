"""Metrics of an evaluation: whatever tells of them tells of every one that is declared."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from tightfit.errors import RecipeError
from tightfit.metrics import METRICS, Evaluation, MetricName, Total, evaluation_metrics, metrics_of, metrics_text
from tightfit.recipe import Recipe
from tightfit.training.summary import Summary

TOKENS = Evaluation(loss=Total(4.0, 2), correct=1)
CLASSES = Evaluation(loss=Total(4.0, 4), correct=2, by_class=np.array([[1, 1, 0], [2, 2, 0], [1, 2, 1]]))


def test_every_metric_is_a_choice_of_the_recipe_a_field_of_the_summary_and_on_the_page():
    assert get_args(MetricName) == tuple(METRICS)
    assert [field.name for field in fields(Summary) if field.name.startswith("eval_")] == [
        *(f"eval_{name}" for name in METRICS), "eval_step"]
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text("utf-8")
    assert all(f"| `eval_{name}` |" in page for name in METRICS)


@pytest.mark.parametrize(("found", "text"), [
    (TOKENS, "loss 2.0000, perplexity 7.39, accuracy 50.0%"), (CLASSES, "loss 1.0000, accuracy 50.0%, macro F1 0.389"),
], ids=["tokens", "classes"])  # fmt: skip
def test_an_evaluations_metrics_are_those_of_what_is_predicted(found, text):
    metrics = evaluation_metrics(found)
    assert metrics_text(metrics) == text
    assert metrics_of({"step": 3, **metrics}) == metrics


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.only_of])
def test_a_metric_of_other_predictions_is_refused(name):
    task = "causal-lm" if METRICS[name].only_of == "classes" else "sequence-classification"
    with pytest.raises(RecipeError, match="is not measured where"):
        Recipe.from_dict({"task": task, "eval_steps": 1, "metric_for_best_model": name})
