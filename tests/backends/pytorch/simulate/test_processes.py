"""A process's memory as it is predicted, alone, against one of two that train."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.processes import in_processes
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.fake_world import following_parts
from tightfit.backends.pytorch.simulate.target import scratch_of
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.world import joined
from tightfit.backends.world import place_in_environment
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.models import model_facts
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import steps_alone
from tightfit.recipe import Recipe
from tightfit.trace import Phase

COLLECTIVES = ("c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default")


def follow_steps(values: dict[str, Any], said: Path) -> None:
    """The first process's peak over three real steps, and the bytes that its collectives handle in the last."""
    place, backend = place_in_environment(), PytorchBackend()
    assert place is not None
    with joined(place, "cpu", 30) as world:
        recipe = Recipe.from_dict(values)
        device = backend.device(recipe)
        recipe = resolve(recipe, device)
        build = backend.build(recipe, device)
        data = GlobalBatchLoader(prepare(recipe, model_facts(recipe)).train, recipe)
        tracker = Tracker(scratch=scratch_of(device))
        tracker.follow(build.model)

        def enter(phase: Phase) -> None:
            gc.collect()  # as in a prediction: when garbage goes is no matter of the step
            tracker.phase = phase

        with tracker, following_parts(tracker), build.session():
            step, begun = Step(build, watch=enter, inspect=False), 0
            for global_batch in step.global_batches(data, 0, 3):
                begun = tracker.memory.next()
                step(global_batch, recipe.learning_rate).read()
        trace = tracker.trace("measured")
        exchanged = [sum(op.name == name for op in trace.ops if op.tick > begun) for name in COLLECTIVES]
        if world.rank == 0:
            said.write_text(json.dumps([trace.peak()[1], exchanged]))


@pytest.mark.parametrize(("parallel", "micro"), [
    ({"name": "fsdp"}, 2), ({"name": "fsdp", "gradient_sync": "last"}, 2), ({"name": "fsdp", "reshard": False}, 4),
    ({"name": "ddp"}, 2), ({"name": "ddp"}, 4),
], ids=str)  # fmt: skip
def test_a_process_takes_what_is_predicted(tiny, tmp_path, parallel, micro):
    overrides = {**tiny["model_overrides"], "n_layer": 4, "n_embd": 256}
    values = {**tiny, "model_overrides": overrides, "micro_batch_size": micro, "parallel": parallel}
    assert in_processes(2, follow_steps, values, tmp_path / "said") == [0, 0]
    peak, exchanged = json.loads((tmp_path / "said").read_text())
    backend, recipe = PytorchBackend(), Recipe.from_dict(values).among(2)
    device = backend.device(recipe)
    predicted = steps_alone(backend.predict(resolve(recipe, device), device))
    assert predicted.peak()[1] == pytest.approx(peak, rel=0.005)
    if parallel["name"] == "fsdp":
        second = predicted.span("step 2")
        found = [sum(op.name == name for op in predicted.ops if second.start <= op.tick < second.stop)
                 for name in COLLECTIVES]  # fmt: skip
        assert found == exchanged
