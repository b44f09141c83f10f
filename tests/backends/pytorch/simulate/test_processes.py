"""A process's memory as it is predicted, alone, against one of two that train."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from tests.training.processes import in_processes
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.fake_world import fake_world, following_parts
from tightfit.backends.pytorch.simulate.target import scratch_of
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.world import joined
from tightfit.backends.world import launched_process
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.devices import Device, find_device
from tightfit.garbage import gc_paused
from tightfit.model_facts import model_facts
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import steps_alone
from tightfit.recipe import Recipe
from tightfit.trace import Phase, Stream

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 40)
COLLECTIVES = ("c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default")


@contextmanager
def gloo_letting_go() -> Iterator[None]:
    """Inside, a collective of FSDP's returns when gloo's thread holds its tensors no longer, a moment after it is
    done: whether the next op comes before that is chance."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter):
            patch.setattr(kind, "__call__", _let_go(kind.__call__))
        yield


def _let_go(collective: Callable[..., Any]) -> Callable[..., Any]:
    def held(tensors: dict[str, Any]) -> int:
        return sum(torch._C._storage_Use_Count(tensors[name].untyped_storage()._cdata)
                   for name in ("output_tensor", "input_tensor"))  # fmt: skip

    def waiting(comm: Any, **tensors: Any) -> Any:
        before, deadline = held(tensors), time.monotonic() + 5
        work = collective(comm, **tensors)
        while held(tensors) > before and time.monotonic() < deadline:
            time.sleep(0.0005)
        return work

    return waiting


def follow_steps(values: dict[str, Any], said: Path) -> None:
    """The first process's peak over three real steps, and the bytes that its collectives handle in the last."""
    place, backend = launched_process(), PytorchBackend()
    assert place is not None
    with gc_paused(), joined(place, "cpu", 30) as world:
        recipe = Recipe.from_dict(values)
        device = backend.device(recipe)
        recipe = resolve(recipe, device)
        build = backend.build(recipe, device)
        data = GlobalBatchLoader(prepare(recipe, model_facts(recipe)).train, recipe)
        tracker = Tracker(scratch=scratch_of(device))

        def enter(phase: Phase) -> None:
            gc.collect()  # as in a prediction: when garbage goes is no matter of the step
            tracker.phase = phase

        step, begun = Step(build, watch=enter, inspect=False), 0
        tracker.follow(build.model)  # as it is once DeepSpeed has its engine, which puts weights elsewhere
        with gloo_letting_go(), tracker, following_parts(tracker), build.process_settings():
            for global_batch in step.global_batches(data, 0, 3):
                begun = tracker.memory.next()
                step(global_batch, recipe.learning_rate).read()
        trace = tracker.trace("measured")
        for allocation in trace.allocations:
            if allocation.op == "aten.split.Tensor":  # gloo's own copy, which its thread gives back when it likes
                allocation.bytes = 0
        exchanged = [sum(op.name == name for op in trace.ops if op.tick > begun) for name in COLLECTIVES]
        if world.rank == 0:
            said.write_text(json.dumps([trace.peak()[1], exchanged]))


@pytest.mark.parametrize(("parallel", "micro"), [
    ({"name": "fsdp"}, 2), pytest.param({"name": "fsdp", "gradient_sync": "last"}, 2, marks=pytest.mark.cold),
    pytest.param({"name": "fsdp", "reshard": False}, 4, marks=pytest.mark.cold),
    pytest.param({"name": "ddp"}, 2, marks=pytest.mark.cold),
    ({"name": "ddp"}, 4),
], ids=str)  # fmt: skip
def test_a_process_takes_what_is_predicted(tiny, tmp_path, parallel, micro):
    overrides = {**tiny["model_overrides"], "n_layer": 4, "n_embd": 256}
    values = {**tiny, "model_overrides": overrides, "micro_batch_size": micro, "parallel": parallel}
    assert in_processes(2, follow_steps, values, tmp_path / "said") == [0, 0]
    peak, exchanged = json.loads((tmp_path / "said").read_text())
    backend, recipe = PytorchBackend(), Recipe.from_dict(values).with_processes(2)
    device = backend.device(recipe)
    predicted = steps_alone(backend.predict(resolve(recipe, device), device))
    assert predicted.peak()[1] == pytest.approx(peak, rel=0.005)
    if parallel["name"] == "fsdp":
        second = predicted.span("step 2")
        found = [sum(op.name == name for op in predicted.ops if second.start <= op.tick < second.stop)
                 for name in COLLECTIVES]  # fmt: skip
        assert found == exchanged


def exchanged(values: dict[str, Any], name: str) -> dict[str, int]:
    """Bytes that a process sends in its second step, of collectives of that name, by the part of the step."""
    recipe = Recipe.from_dict(values).with_processes(2)
    device = replace(find_device("rtx-3090"), cards=2)
    trace = PytorchBackend().predict(resolve(recipe, device), device)
    found: dict[str, int] = {}
    for op, times in trace.step_ops():
        if name in op.name:
            assert op.stream is Stream.NETWORK
            found[op.phase.value] = found.get(op.phase.value, 0) + times * op.bytes_read
    return found


def weights(values: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the model's blocks, and of what lies outside of them."""
    recipe = Recipe.from_dict(values)
    model = PytorchBackend().build(resolve(recipe, CPU), CPU).model
    inside = {name: 4 * p.numel() for name, p in model.named_parameters() if ".h." in name}
    return sum(inside.values()), sum(4 * p.numel() for name, p in model.named_parameters() if name not in inside)


@pytest.mark.parametrize("parallel", [{}, {"gradient_sync": "last"}, {"reshard": False}], ids=str)
def test_fsdp_exchanges_the_bytes_of_its_parts(tiny, parallel):
    """Two micro-batches of 2 for each of two processes; a process sends the half of everything that it has not."""
    values = {**tiny, "micro_batch_size": 2, "batch_size": 8, "precision": "fp32", "compile": "off",
              "checkpointing": "none", "parallel": {"name": "fsdp", **parallel}}  # fmt: skip
    blocks, outside = weights(tiny)
    gathered = exchanged(values, "_allgather_base_")
    assert gathered["forward"] == 2 * (blocks + outside) // 2
    assert gathered.get("backward", 0) == (0 if "reshard" in parallel else 2 * blocks // 2)
    sums = 1 if "gradient_sync" in parallel else 2
    assert exchanged(values, "_reduce_scatter_base_") == {"backward": sums * (blocks + outside) // 2}


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_ddp_exchanges_the_gradients_once(tiny, micro):
    values = {**tiny, "micro_batch_size": micro, "batch_size": 8, "precision": "fp32", "compile": "off",
              "checkpointing": "none", "parallel": "ddp"}  # fmt: skip
    assert exchanged(values, "all_reduce") == {"backward": sum(weights(tiny))}


def test_buckets_fill_while_the_backward_pass_goes_on(tiny):
    overrides = {**tiny["model_overrides"], "n_layer": 3, "n_embd": 1024}
    recipe = Recipe.from_dict({**tiny, "model_overrides": overrides, "micro_batch_size": 4, "batch_size": 8,
                               "parallel": "ddp"}).with_processes(2)  # fmt: skip
    device = replace(find_device("rtx-3090"), cards=2)
    trace = PytorchBackend().predict(resolve(recipe, device), device)
    ops = [op for op, _ in trace.step_ops()]
    sums = [op for op in ops if "all_reduce" in op.name]
    assert len(sums) > 3
    assert [op.tick for op in ops] == sorted(op.tick for op in ops)
    last = max(op.tick for op in ops if op.phase is Phase.BACKWARD and op.stream is Stream.COMPUTE)
    assert sums[0].tick < last < sums[-1].tick
    waits = next(op for op in ops if op.phase is Phase.OPTIMIZER)
    assert sums[-1].tick in waits.after


def test_a_world_that_is_not_there_leaves_errors_as_they_are_told():
    before = sys.excepthook
    with fake_world(2):
        assert sys.excepthook is not before
    assert sys.excepthook is before
