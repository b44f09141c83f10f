"""Predictions against real steps on the CPU, and what they promise: whole global batches, nothing allocated, clear
errors."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import nn

from cpu_cases import ADAPTED, ALTERNATING, CHUNKED, FP8, MUON, TILED, Case, cases
from cpu_truth import PHASES
from plan_vs_cpu import BOUND, compare
from tests.own_models import Scores
from tests.plain import CPU, PLAIN
from tightfit import Recipe
from tightfit.backends.pytorch.simulate import predict as prediction
from tightfit.backends.pytorch.simulate.fake_global_batches import micro_batch_sizes
from tightfit.devices import find_device
from tightfit.errors import ModelError
from tightfit.trace import Category, Trace

pytestmark = pytest.mark.usefixtures("few_objects")

FIELDS = {**PLAIN, "pretrained": False, "data": "dummy"}


BY_HAND = len(CHUNKED + FP8 + ADAPTED + ALTERNATING + TILED + MUON)
CASES = [*cases()[:-BY_HAND:19], *cases()[-BY_HAND:]]
"""A few of the benchmark's."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_prediction_is_what_the_allocator_hands_out(case: Case):
    error = compare(case)["error"]
    assert max(map(abs, error.values())) <= BOUND, error


def test_documents_longer_than_a_sliding_window_cost_a_processor_no_more_than_predicted():
    found = compare(Case("mistral", {"micro_batch_size": 1, "data": "stdlib"}, dropout=False, documents=2))
    assert all(0 <= error < 0.1 for error in found["error"].values()), found


def tiny_gpt2(**fields) -> Recipe:
    return Recipe.from_dict({
        **FIELDS, "model": "gpt2", "vocab_size": 96, "seq_len": 16,
        "model_overrides": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}, **fields,
    })


def peaks(trace: Trace) -> dict[str, int]:
    return {phase: max(trace.peak(s.start, s.stop)[1] for s in trace.spans if s.name == phase) for phase in PHASES}


@pytest.mark.parametrize("batch", [10, 9])
def test_a_global_batch_from_few_micro_batches_is_the_whole_global_batch(batch, monkeypatch):
    recipe = tiny_gpt2(batch_size=batch, micro_batch_size=2)
    spliced = prediction.predict(recipe, CPU)
    apart = [(size, 1) for size in micro_batch_sizes(recipe)]
    monkeypatch.setattr(prediction, "micro_batch_groups", lambda recipe, ends_apart=False: apart)
    whole = prediction.predict(recipe, CPU)
    assert len(whole.ops) > len(spliced.ops)
    assert peaks(spliced) == peaks(whole)
    for measure in ("flops", "bytes_read", "bytes_written"):
        totals = [sum(getattr(op, measure) * times for op, times in t.step_ops()) for t in (spliced, whole)]
        assert totals[0] == totals[1]


def test_a_global_batch_of_a_billion_micro_batches_is_never_listed():
    trace = prediction.predict(tiny_gpt2(batch_size=10**9, micro_batch_size=1), CPU)
    backward = [span for span in trace.spans if span.name == "backward" and span.step == 2]
    assert [span.times for span in backward] == [1, 10**9 - 1]


def test_a_model_larger_than_this_machine_is_predicted_without_a_parameter():
    recipe = Recipe.from_dict({
        **FIELDS, "model": "llama-3.1-8b", "precision": "bf16", "batch_size": 1, "micro_batch_size": 1, "seq_len": 512,
        "model_overrides": {
            "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "head_dim": 128,
        },
    })
    process = psutil.Process()
    before = process.memory_info().rss
    trace = prediction.predict(recipe, find_device("b200"))
    weights = trace.by_category(trace.peak()[0])[Category.WEIGHTS]
    assert weights > psutil.virtual_memory().total
    assert process.memory_info().rss - before < 1 << 30


def test_the_evaluation_and_going_on_from_a_checkpoint_have_peaks_of_their_own():
    trace = prediction.predict(tiny_gpt2(batch_size=8, micro_batch_size=8), CPU)
    step, evaluation, resume = (
        trace.peak(span.start, span.stop)[1] for span in map(trace.span, ("step 2", "evaluation", "resume"))
    )
    assert 0 < evaluation < step
    weights = sum(a.bytes for a in trace.allocations if a.category is Category.WEIGHTS)
    assert resume >= 4 * weights  # weights, gradients of zero, and two states


def test_where_no_data_is_held_out_nothing_is_evaluated():
    recipes = (tiny_gpt2(batch_size=4, micro_batch_size=2, data={"eval_fraction": share}) for share in (0.1, 0.0))
    held_out, none = (prediction.predict(recipe, CPU) for recipe in recipes)
    assert {s.name for s in held_out.spans} - {s.name for s in none.spans} == {"evaluation"}
    assert none.peak()[1] == held_out.peak()[1]


OF_96 = {**FIELDS, "vocab_size": 96, "batch_size": 2, "micro_batch_size": 2, "seq_len": 8}


class Counting(Scores):
    """Its result's shape hangs on values."""

    def forward(self, input_ids):
        return super().forward(input_ids) + torch.nonzero(input_ids).shape[0]


class Own(Scores):
    """Logits from a middle part of a person's own."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__(96)
        self.middle = middle

    def forward(self, input_ids):
        middle = self.middle(self.embed(input_ids))
        return self.out(middle[0] if isinstance(middle, tuple) else middle)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, values):
        return torch.fft.ifft(torch.fft.fft(values) * self.factors).real


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("middle", [
    lambda: nn.GRU(8, 8, num_layers=2, batch_first=True), lambda: nn.LSTM(8, 8), lambda: nn.RNN(8, 8, batch_first=True),
    lambda: nn.utils.weight_norm(nn.Linear(8, 8)), Fourier,
], ids=["gru", "lstm", "rnn", "weight norm", "complex"])
@pytest.mark.parametrize("device", [CPU, find_device("rtx-4090")], ids=["cpu", "gpu"])
def test_modules_of_many_kinds_are_traced(middle, device):
    trace = prediction.predict(Recipe.from_dict(OF_96), device, Own(middle()))
    assert any(a.category is Category.OPTIMIZER for a in trace.allocations)


def test_a_model_that_cannot_be_traced_is_refused_by_its_op():
    with pytest.raises(ModelError, match="nonzero"):
        prediction.predict(Recipe.from_dict({**OF_96, "attention": "sdpa"}), CPU, Counting(96))


class Shorter(Scores):
    """Logits of all tokens but the first."""

    def forward(self, input_ids):
        return super().forward(input_ids)[:, 1:]


def test_logits_of_another_shape_than_the_labels_are_refused():
    with pytest.raises(ModelError, match=r"Shorter gives logits of shape \(2, 7, 96\); labels of shape \(2, 8\) need"):
        prediction.predict(Recipe.from_dict(OF_96), CPU, Shorter(96))
