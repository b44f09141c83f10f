"""The metrics of an evaluation: what they count, and that they take no memory of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.built import built
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.loss.of_logits import Tally
from tightfit.devices import Device
from tightfit.metrics import METRICS, Evaluation, evaluation_metrics
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch, global_batch_of
from tightfit.trace import Trace


class Echo(nn.Module):
    """Logits that are largest at the class that an input names; 0 where it names none."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(classes) * 4.0)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table[input_ids[:, 0] if self.table.shape[0] == 3 else input_ids]


def evaluation(task: str, classes: int, predicted: list[list[int]], labels: list[Any]) -> Evaluation:
    """Of micro-batches whose predictions and labels are given."""
    build = built({"task": task, "vocab_size": classes, "num_labels": classes, "batch_size": 8,
                   "micro_batch_size": 4, "device": "cpu", "data": "dummy"}, Echo(classes))  # fmt: skip
    return Step(build).evaluate([global_batch_of(tuple(
        MicroBatch(inputs={"input_ids": np.array(p)}, labels=np.array(wanted))
        for p, wanted in zip(predicted, labels, strict=True)))])


def test_accuracy_and_macro_f1_of_classes():
    found = evaluation("sequence-classification", 3, [[[0], [1], [1]], [[2], [1]]], [[0, 1, 0], [1, IGNORE]])
    # class 0: 1 right, 2 labels, 1 predicted; class 1: 1, 2, 2; class 2: 0, 0, 1. The row without a label is left out.
    assert (found.loss.count, found.correct) == (4, 2)
    assert METRICS["f1"].finish(found) == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)


def test_classes_that_nobody_names_have_no_part_in_f1():
    found = evaluation("sequence-classification", 3, [[[0], [0]]], [[0, 0]])
    assert (found.correct, METRICS["f1"].finish(found)) == (2, 1.0)


def test_token_accuracy_is_over_the_labels_that_count():
    found = evaluation("causal-lm", 8, [[[1, 2, 3], [4, 5, 6]]], [[[1, 2, 7], [IGNORE, 5, IGNORE]]])
    assert (found.loss.count, found.correct) == (4, 3)
    assert "eval_f1" not in evaluation_metrics(found)


@pytest.mark.parametrize("changes", [{"loss": "plain"}, {"loss": {"name": "chunked", "tokens": 16}},
                                     {"precision": "bf16"}, {"task": "sequence-classification"}], ids=str)
@pytest.mark.parametrize("device", [Device(kind="cpu", name="CPU", memory_bytes=2**34),
                                    Device(kind="cuda", name="any", memory_bytes=2**34, capability=(8, 6))],
                         ids=lambda device: device.kind)
def test_counting_takes_no_memory(tiny, monkeypatch, device, changes):
    def peak() -> int:
        recipe = resolve(Recipe.from_dict({**tiny, "device": "auto", **changes}), device)
        trace: Trace = PytorchBackend().predict(recipe, device)
        span = trace.span("evaluation")
        return trace.peak(span.start, span.stop)[1]

    counted = peak()
    monkeypatch.setattr(Tally, "__call__", lambda *_: None)
    assert counted == peak()
