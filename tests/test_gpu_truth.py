"""What is measured on a GPU: the global batches that are trained on, and what the meter reads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.benchmark_modules import benchmark
from tightfit.backends.pytorch.simulate.fake_global_batches import fake_global_batch, micro_batch_sizes
from tightfit.model_facts import model_facts
from tightfit.tasks import TASKS

cases, truth, global_batches = map(benchmark, ("gpu_cases", "gpu_truth", "random_global_batches"))


@pytest.mark.parametrize(("line", "mask"), [
    ("gpt2 3x16*2.5", "none"),
    ("gpt2 3x16 data=stdlib", "packed"),
    ("gpt2 3x16 data=stdlib data.packing=false", "none"),
    ("bert-base 3x16 data=stdlib", "packed"),
    ("t5-small 3x15 data=stdlib data.packing=false pad_sequence_to=8", "padded"),
    ("bert-base 3x16 task=sequence-classification data=stdlib", "padded"),
    ("vit-base 3x1", "none"),
])
def test_global_batches_have_the_shapes_that_planning_takes_them_to_have(line, mask, tmp_path):
    recipe = cases.Case("any", line, cases.Aim("fill", 90)).recipe(tmp_path)
    task, facts = TASKS[recipe.task], model_facts(recipe)
    real = global_batches.random_global_batch(recipe, task, facts, seed=0)
    build = SimpleNamespace(recipe=recipe, task=task, facts=facts)
    fake = fake_global_batch(build, micro_batch_sizes(recipe), lambda tensor: None)
    assert real.samples == recipe.batch_size
    assert len(real.micro_batches) == len(fake.micro_batches)
    for one, other in zip(real.micro_batches, fake.micro_batches, strict=True):
        planned = other.to(torch.device("cpu"))
        assert one.mask == planned.mask == mask
        assert shapes(one) == shapes(planned)


def shapes(batch):
    found = []
    batch.map(lambda tensor: found.append((tensor.shape, tensor.dtype)) or tensor)
    return found


def test_packed_rows_hold_documents_whose_positions_restart(tmp_path):
    recipe = cases.Case("any", "gpt2 3x16 data=stdlib", cases.Aim("fill", 90)).recipe(tmp_path)
    batch = global_batches.random_global_batch(recipe, TASKS["causal-lm"], model_facts(recipe), seed=1).micro_batches[0]
    ids, positions = batch.document_ids.numpy(), batch.inputs["position_ids"].numpy()
    assert (np.diff(ids, axis=1) >= 0).all()
    assert [len(set(row)) for row in ids] == [4, 4, 4]
    fresh = np.diff(ids, axis=1) > 0
    assert (positions[:, 1:][fresh] == 0).all()
    assert (positions[:, 1:][~fresh] == positions[:, :-1][~fresh] + 1).all()


def test_the_meter_counts_shared_memory_once():
    whole = torch.zeros(100)
    assert truth.held_bytes([whole, whole[:10], torch.zeros(5)]) == 420


def test_phases_and_categories_are_read_from_the_allocator(monkeypatch):
    """The meter against an allocator whose figures are given."""
    now = {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0, "reserved_bytes.all.peak": 0,
           "num_alloc_retries": 1, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict(now))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def at(peak, current, reserved):
        now.update({"allocated_bytes.all.peak": peak, "allocated_bytes.all.current": current,
                    "reserved_bytes.all.peak": reserved})

    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    model = torch.nn.Module()
    model.register_parameter("w", parameter)
    build = SimpleNamespace(model=model)
    meter = truth.Meter(cuda=True)
    meter.of(build, SimpleNamespace(parameters=[parameter], optimizer=optimizer, build=build))
    forward, backward, update = truth.Phase.FORWARD, truth.Phase.BACKWARD, truth.Phase.OPTIMIZER
    for base in (100, 150):  # the second step has states
        at(base, base, 500)
        meter.enter(forward)
        at(base + 90, base + 60, 600)
        meter.enter(backward)
        at(base + 120, base + 30, 700)
        parameter.grad = torch.ones(8)
        meter.enter(update)
        optimizer.step()
        at(base + 40, base, 700)
        meter.enter(None)
    found = meter.result()
    assert found["phases"] == {"forward": 240, "backward": 270, "optimizer": 190}
    assert (found["peak_allocated"], found["peak_reserved"], found["retries"]) == (270, 700, 1)
    assert found["categories"]["kept by forward"] == 60
    assert found["categories"]["weights"] == found["categories"]["gradients"] == 32
