"""Copies between the device and the host: what they give, what a trace shows of them, and what a race would spoil."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.allocations import allocated
from tests.backends.pytorch.measure.test_measure import BACKEND, prepared
from tightfit.backends import load_backend
from tightfit.backends.measuring import measure
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.target import PlanningMode, simulate
from tightfit.backends.pytorch.techniques.by_block.transfers import TO_DEVICE, TO_HOST, WAIT, Copy, Transfers
from tightfit.devices import Device, find_device
from tightfit.planning.estimate import predict_memory
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe
from tightfit.trace import PAGEABLE, Category, OpClass, Phase, Place, Span, Stream, Trace

CPU = torch.device("cpu")
A10 = find_device("a10")
PROCESSOR = Device(kind="cpu", name="CPU", memory_bytes=1 << 40)
BLOCKS, ROWS, WIDTH = 4, 32, 64


class Offloading(nn.Module):
    """Linear layers whose inputs wait for the backward pass in the host's memory, fetched one layer ahead."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__()
        self.transfers = transfers
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> list[Copy]:
        copies = []
        with torch.no_grad():
            for layer in self.layers:
                copies.append(self.transfers.to_host(x))
                x = layer(x).relu()
        for copy in copies:
            copy.wait()
        return copies

    def gradients(self, gradient: Tensor, kept: list[Copy]) -> list[Tensor]:
        found: list[Tensor] = []
        with torch.no_grad():
            ahead = self.transfers.to_device(kept[-1].target, after=[kept[-1]])
            for number in reversed(range(BLOCKS)):
                fetched = ahead
                if number:
                    ahead = self.transfers.to_device(kept[number - 1].target, after=[kept[number - 1]])
                x = fetched.wait()
                weight = self.layers[number].get_parameter("weight")
                output = x @ weight.T
                gradient = gradient * (output > 0)
                found.insert(0, gradient.T @ x)
                gradient = gradient @ weight
        return found


def run(model: Offloading, tracker: Tracker | None = None) -> list[Tensor]:
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    if tracker is None:
        return model.gradients(torch.ones_like(x), model(x))
    tracker.follow(model)
    with tracker, tracker.span("step 1", step=1):
        tracker.mark(x, Category.OTHER, from_birth=True)
        tracker.phase = Phase.FORWARD
        kept = model(x)
        tracker.phase = Phase.BACKWARD
        found = model.gradients(torch.ones_like(x), kept)
        tracker.phase = Phase.OPTIMIZER
        del kept
    tracker.unfollow()
    return found


def predicted(device: Device) -> Trace:
    tracker = Tracker()
    with simulate(device), PlanningMode(device):
        transfers = Transfers(CPU, pinned=device.kind == "cuda")
        run(Offloading(transfers), tracker)
        return tracker.trace("predicted")


def test_gradients_of_offloaded_inputs_are_autograds():
    torch.manual_seed(0)
    model = Offloading(Transfers(CPU))
    found = run(model)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    for layer in model.layers:
        x = layer(x).relu()
    x.sum().backward()
    for layer, gradient in zip(model.layers, found, strict=True):
        torch.testing.assert_close(layer.weight.grad, gradient)
    assert not model.transfers._begun


def test_a_prediction_is_the_real_run_to_the_byte_in_either_place():
    """The host holds every layer's input; of the device's memory the curve is the same at every tick."""
    tracker = Tracker()
    run(Offloading(Transfers(CPU)), tracker)
    real = tracker.trace("measured")
    for device in (PROCESSOR, A10):
        fake = predicted(device)
        assert fake.peak(place=Place.HOST)[1] == real.peak(place=Place.HOST)[1] == BLOCKS * ROWS * WIDTH * 4
        assert fake.peak()[1] == real.peak()[1]
        for place in (Place.DEVICE, Place.HOST):
            assert [list(part) for part in fake.curve(place)] == [list(part) for part in real.curve(place)]
        assert [(op.name.removesuffix(PAGEABLE), op.stream, op.after) for op in fake.ops] == [
            (op.name.removesuffix(PAGEABLE), op.stream, op.after) for op in real.ops]


def test_the_allocators_own_events_confirm_the_bytes_of_both_places():
    model = Offloading(Transfers(CPU))
    highest = max(allocated(lambda: run(model)))
    weights = BLOCKS * WIDTH * WIDTH * 4
    trace = predicted(PROCESSOR)
    ticks = {int(tick) for place in (Place.DEVICE, Place.HOST) for tick in trace.curve(place)[0]}
    both = max(sum(a.bytes for place in Place for a in trace.alive(tick, place)) for tick in ticks)
    assert both - weights == pytest.approx(highest, rel=0.01)  # numbers of a few bytes besides


def test_copies_are_ops_on_their_streams_that_wait_and_are_waited_for():
    trace = predicted(A10)
    size = ROWS * WIDTH * 4
    out = [op for op in trace.ops if op.stream is Stream.COPY_OUT]
    back = [op for op in trace.ops if op.stream is Stream.COPY_IN]
    assert [op.name for op in out] == [TO_HOST] * BLOCKS
    assert [op.name for op in back] == [TO_DEVICE] * BLOCKS
    assert {(op.bytes_read, op.bytes_written, op.op_class) for op in out + back} == {
        (size, size, OpClass.COMMUNICATION)}
    compute = [op for op in trace.ops if op.stream is Stream.COMPUTE]
    waiting = [op for op in compute if op.after]
    assert waiting[0].after == tuple(op.tick for op in out)  # at the end of the forward pass, for all
    assert [op.after for op in waiting[1:]] == [(op.tick,) for op in back]
    for number, op in enumerate(back):  # its own copy out, and what was computed until its memory was there
        assert op.after[0] == out[BLOCKS - 1 - number].tick
        assert op.after[1] == max(other.tick for other in compute if other.tick < op.tick)
    held = [a for a in trace.allocations if a.place is Place.HOST]
    assert len(held) == BLOCKS
    assert all(a.pinned and a.bytes == size for a in held)


def test_the_card_and_the_host_are_planned_for_each_by_itself():
    trace = predicted(A10)
    trace.spans.append(Span(name="step 2", start=0, stop=10**6, step=2))
    memory = predict_memory(trace, Recipe(), A10, standard_tools(load_backend("pytorch")))
    assert memory.host == BLOCKS * ROWS * WIDTH * 4
    assert memory.peak_allocated == pytest.approx(trace.peak()[1], abs=512 * len(trace.allocations))


def test_memory_that_is_not_locked_is_said_in_the_copys_name():
    tracker = Tracker()
    with simulate(A10), PlanningMode(A10), tracker:
        transfers = Transfers(CPU, pinned=True)
        transfers.to_device(torch.empty(4)).wait()
    assert [op.name for op in tracker.ops] == [TO_DEVICE + PAGEABLE]


def test_the_host_waits_for_what_it_reads():
    tracker = Tracker()
    with tracker:
        copy = Transfers(CPU).to_host(torch.ones(4) * 3)
        assert copy.wait_on_host().sum() == 12
    waited = next(op for op in tracker.ops if op.name == WAIT)
    assert (waited.stream, waited.after) == (Stream.HOST, (copy.tick,))


def test_targets_that_are_given_are_written_and_no_memory_is_asked_for():
    transfers, tracker = Transfers(CPU), Tracker()
    with tracker:
        buffer, source = torch.zeros(2, 3), torch.rand(2, 3, requires_grad=True)
        known = len(tracker.allocations)
        assert transfers.to_host(source, buffer).wait() is buffer
    assert len(tracker.allocations) == known
    assert [a.place for a in tracker.allocations if a.shape == (2, 3)] == [Place.HOST, Place.DEVICE]
    assert torch.equal(buffer, source)
    assert not buffer.requires_grad
    with pytest.raises(AssertionError, match="a target is as its source"):
        transfers.to_host(source.detach().view(3, 2), buffer)


def test_what_is_copied_lives_until_the_copy_was_waited_for():
    tracker = Tracker()
    with tracker:
        transfers = Transfers(CPU)
        copy = transfers.to_host(torch.ones(8))
        target = copy.target
        del copy
        torch.ones(1)
        assert tracker.allocations[0].died is None
        next(iter(transfers._begun)).wait()
        assert tracker.allocations[0].died is not None
        assert target.sum() == 8


class Late(Transfers):
    """Makes each copy as late as it may: when it is waited for. Until then its target holds nothing to be read."""

    def _run(self, copy, source, after):
        copy.target.fill_(torch.nan)

    def finish(self, copy):
        for begun in [c for c in self._begun if c.stream is copy.stream]:  # a stream keeps its order
            if begun in self._begun:
                begun.target.copy_(self._begun[begun])
                super().finish(begun)
            if begun is copy:
                break


def test_late_copies_give_the_same_and_a_wait_left_out_is_seen():
    torch.manual_seed(0)
    early = Offloading(Transfers(CPU))
    late = Offloading(Late(CPU))
    late.load_state_dict(early.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(run(early), run(late), strict=True))
    transfers = Late(CPU)
    copy = transfers.to_host(torch.ones(3))
    assert copy.target.isnan().all()
    assert copy.wait().sum() == 3


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_the_computing_and_come_out_right():
    device = torch.device("cuda")
    transfers = Transfers(device)
    x = torch.rand(1 << 22, device=device)
    for _ in range(3):
        kept = transfers.to_host(x)
        y = x * 2
        assert kept.target.is_pinned()
        kept.wait()
        x.zero_()
        back = transfers.to_device(kept.target, after=[kept])
        x = back.wait() + 0 * y
    torch.testing.assert_close(x.cpu(), kept.wait_on_host())
    assert x.abs().sum() > 0


@pytest.mark.usefixtures("few_objects")
def test_a_profile_shows_copies_on_their_streams_and_host_memory_in_its_place():
    found = profiled_step()
    out, back = ([op for op in found.ops if op.stream is stream] for stream in (Stream.COPY_OUT, Stream.COPY_IN))
    assert [op.name for op in out + back] == [TO_HOST, TO_DEVICE]
    assert all(op.seconds is not None and op.seconds > 0 for op in out + back)
    assert back[0].after[0] == out[0].tick
    (held,) = [a for a in found.allocations if a.place is Place.HOST]
    assert held.bytes == 4 * 1000
    assert found.peak(place=Place.HOST)[1] == 4000


def profiled_step() -> Trace:
    """A measured step of a tiny model, that copies a tensor of 1,000 numbers out and back in its forward pass."""
    transfers = Transfers(CPU)

    def copy(*_):
        kept = transfers.to_host(torch.ones(1000))
        transfers.to_device(kept.target, after=[kept]).wait()

    step, global_batches = prepared("gpt2", batch_size=3)
    step.build.model.register_forward_pre_hook(copy)
    return measure(BACKEND, step, global_batches).trace
