"""The tracker: what memory holds, which phase and module work belongs to, and that following changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.trace import Category, Op, OpClass, Phase, Trace

BATCH, WIDTH = 8, 16


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
        self.again = False

    def forward(self, x):
        inner = checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x)
        return self.second(inner).sum()

    def inside(self, x):
        return torch.nn.functional.gelu(self.first(x))


def traced(model: nn.Module, x: torch.Tensor, autocast: bool = False) -> Trace:
    tracker = Tracker()
    tracker.follow(model)
    with tracker:
        tracker.mark(x, Category.OTHER, from_birth=True)
        tracker.phase = Phase.FORWARD
        with tracker.span("forward"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x)
        tracker.phase = Phase.BACKWARD
        with tracker.span("backward"):
            loss.backward()
    tracker.unfollow()
    return tracker.trace("measured")


@pytest.fixture(params=["real", "fake"])
def setting(request):
    """A model and its input, on real tensors and on fake ones."""
    mode = FakeTensorMode() if request.param == "fake" else None
    if mode is not None:
        mode.__enter__()
    yield Small(), torch.zeros(BATCH, WIDTH)
    if mode is not None:
        mode.__exit__(None, None, None)


def sizes(trace: Trace, category: Category) -> list[int]:
    return sorted(a.bytes for a in trace.allocations if a.category is category)


def test_weights_gradients_and_inputs_are_told_apart(setting):
    trace = traced(*setting)
    linear = [4 * 4 * WIDTH * WIDTH, 4 * 4 * WIDTH, 4 * 4 * WIDTH * WIDTH, 4 * WIDTH]
    assert sizes(trace, Category.WEIGHTS) == sorted(linear)
    assert sizes(trace, Category.GRADIENTS) == sorted(linear)
    assert sizes(trace, Category.OTHER) == [4 * BATCH * WIDTH]


def test_activations_are_what_the_backward_pass_finds(setting):
    trace = traced(*setting)
    wide = 4 * BATCH * 4 * WIDTH
    assert [size for size in sizes(trace, Category.ACTIVATIONS) if size > 100] == [wide, wide]  # gelu's input, output


def test_a_recomputed_region_keeps_its_activations_from_its_recomputation_on(setting):
    model, x = setting
    model.again = True
    trace = traced(model, x)
    forward = trace.span("forward")
    assert {op.phase for op in trace.ops} == {Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD}
    kept = [a for a in trace.allocations if a.category is Category.ACTIVATIONS and a.bytes > 100]
    assert {a.op for a in kept} >= {"aten.addmm.default"}
    assert sum(a.born < forward.stop for a in kept) == 1  # what the region gives; what lies inside it comes later
    recomputed = [op.name for op in trace.ops if op.phase is Phase.RECOMPUTE]
    assert recomputed[0] == "aten.addmm.default"


def test_work_belongs_to_its_module_forward_and_backward(setting):
    trace = traced(*setting)
    products = [(op.phase, op.module) for op in trace.ops if op.name in ("aten.addmm.default", "aten.mm.default")]
    assert products[:2] == [(Phase.FORWARD, "first"), (Phase.FORWARD, "second")]
    assert {module for phase, module in products if phase is Phase.BACKWARD} == {"first", "second"}
    gradients = {a.module for a in trace.allocations if a.category is Category.GRADIENTS}
    assert gradients == {"first", "second"}


def test_autocast_copies_of_weights_are_temporary_however_long_they_live(setting):
    trace = traced(*setting, autocast=True)
    matrices = [a for a in trace.allocations if a.dtype == "bfloat16" and a.bytes == 2 * 4 * WIDTH * WIDTH
                and a.op == "aten._to_copy.default"]
    assert len(matrices) == 2
    assert {a.category for a in matrices} == {Category.TEMPORARY}


def test_fake_tensors_and_real_ones_give_the_same_trace():
    real = traced(Small(), torch.zeros(BATCH, WIDTH))
    with FakeTensorMode():
        fake = traced(Small(), torch.zeros(BATCH, WIDTH))
    assert [(op.name, op.module, op.phase, op.flops) for op in real.ops] == \
        [(op.name, op.module, op.phase, op.flops) for op in fake.ops]
    assert real.peak()[1] == fake.peak()[1]


def test_following_leaves_no_hooks_and_changes_no_gradient():
    torch.manual_seed(0)
    model, x = Small(), torch.randn(BATCH, WIDTH)
    traced(model, x)
    followed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(followed, model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_is_paused_is_not_counted():
    tracker = Tracker()
    with tracker:
        with tracker.paused():
            hidden = torch.zeros(1000)
        seen = torch.zeros(10)
    assert [a.bytes for a in tracker.trace("measured").allocations] == [seen.nbytes]
    del hidden


def test_a_region_reports_its_kernels_and_its_passing_memory(setting):
    tracker = Tracker()
    with tracker.region("compiled"):
        tracker.launch(Op(name="kernel", tick=0, phase=Phase.SETUP, op_class=OpClass.OTHER), 640)
    trace = tracker.trace("predicted")
    assert trace.peak()[1] == 640
    assert (trace.allocations[0].op, trace.ops[0].name) == ("compiled", "kernel")
    assert trace.allocations[0].died is not None
