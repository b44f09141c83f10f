"""ZeRO as a plan declares it: what a process holds and sends, against the stages' own arithmetic and real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.backends.pytorch.simulate.test_processes import follow_steps
from tests.deepspeed import each_stage, needs_deepspeed, zero
from tests.training.processes import in_processes
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import steps_alone
from tightfit.recipe import Recipe
from tightfit.trace import Place, Stream, Trace

PROCESSES = 4


def planned(tiny: dict[str, Any], knobs: dict[str, Any], processes: int = PROCESSES) -> Trace:
    """On GPUs, with two micro-batches for each process."""
    overrides = {**tiny["model_overrides"], "n_layer": 4, "n_embd": 256}
    values = {**tiny, "model_overrides": overrides, "batch_size": 16, "micro_batch_size": 2, "device": "auto",
              "precision": "fp32", "loss": "plain", "optimizer": {"name": "adamw", "implementation": "fused"},
              "parallel": zero(knobs)}  # fmt: skip
    recipe = Recipe.from_dict(values).with_processes(processes)
    device = replace(find_device("rtx-3090"), cards=processes)
    return PytorchBackend().predict(resolve(recipe, device), device)


def held(trace: Trace, place: Place) -> int:
    """Bytes of weights, gradients and optimizer states between two steps."""
    at = trace.span("step 2").stop
    return sum(a.bytes for a in trace.allocations
               if a.place is place and a.born < at and (a.died is None or a.died >= at) and a.holds(at) in
               ("weights", "gradients", "optimizer"))  # fmt: skip


@each_stage
def test_a_process_holds_its_parts(tiny, knobs):
    trace = planned(tiny, knobs)
    whole = held(planned(tiny, {"stage": 1}), Place.DEVICE) / (1 + 3 / PROCESSES)  # weights; two states and a copy
    offloads, divides = "offload" in knobs, knobs["stage"] == 3
    device = whole * ((1 / PROCESSES if divides else 1) + 3 / PROCESSES)
    host = 0.0
    if offloads:
        device, host = (0.0 if divides else whole), whole * 5 / PROCESSES
    assert held(trace, Place.DEVICE) == pytest.approx(device, rel=0.01, abs=0.01 * whole)
    assert held(trace, Place.HOST) == pytest.approx(host, rel=0.01)
    assert "declared, from its source" in " ".join(trace.notes)


def test_one_process_holds_it_all(tiny):
    one, all_of_them = (held(planned(tiny, {"stage": 3}, processes), Place.DEVICE) for processes in (1, PROCESSES))
    assert one == pytest.approx(PROCESSES * all_of_them, rel=0.01)


def test_all_parts_wait_on_a_drive_and_gradients_are_summed_in_the_hosts_memory(tiny):
    in_memory = planned(tiny, {"stage": 3, "offload": "cpu"})
    on_drive = planned(tiny, {"stage": 3, "offload": "nvme", "nvme_path": "/mnt/nvme"})
    whole = held(in_memory, Place.HOST)
    assert held(on_drive, Place.HOST) == pytest.approx(whole / 5, rel=0.01)
    assert held(on_drive, Place.DRIVE) == pytest.approx(whole, rel=0.01)
    assert on_drive.peak() == in_memory.peak()


def sent(trace: Trace) -> int:
    step = trace.span("step 2")
    times = {(span.start, span.stop): span.times for span in trace.spans if span.name in ("forward", "backward")}
    return sum(op.bytes_read * next((n for (start, stop), n in times.items() if start <= op.tick < stop), 1)
               for op in trace.ops if op.stream is Stream.NETWORK and op.bytes_read
               and op.op_class == "communication" and step.start <= op.tick < step.stop)  # fmt: skip


@pytest.mark.parametrize(("stage", "weights"), [(1, 1 + 1), (2, 2 + 1)])
def test_a_process_sends_what_its_stage_does(tiny, stage, weights):
    """Gradients once a step, or once for each of two micro-batches, and the weights after the update."""
    trace = planned(tiny, {"stage": stage})
    whole = sum(a.bytes for a in trace.allocations if a.category == "weights")
    assert sent(trace) == pytest.approx(weights * whole * (PROCESSES - 1) / PROCESSES, rel=0.01)


@pytest.mark.cold
@needs_deepspeed
@pytest.mark.usefixtures("deepspeed_loaded")
@each_stage
def test_a_process_takes_about_what_is_declared(tiny, tmp_path, knobs):
    overrides = {**tiny["model_overrides"], "n_layer": 4, "n_embd": 1024}
    values = {**tiny, "model_overrides": overrides, "micro_batch_size": 2, "parallel": zero(knobs)}
    assert in_processes(2, follow_steps, values, tmp_path / "said") == [0, 0]
    peak, _ = json.loads((tmp_path / "said").read_text())
    backend, recipe = PytorchBackend(), Recipe.from_dict(values).with_processes(2)
    device = backend.device(recipe)
    assert steps_alone(backend.predict(resolve(recipe, device), device)).peak()[1] == pytest.approx(peak, rel=0.05)
