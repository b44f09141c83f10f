"""What CUDA's kernels keep for the backward pass, on fake tensors that stand for a GPU's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.backends.pytorch.simulate.target_cases import A100, BF16, CPU, FP16, FP32, H100, V100
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.cuda.scratch import scratch
from tightfit.backends.pytorch.simulate.target import PlanningMode, simulate
from tightfit.devices import Device


def saved_by(run, device: Device = A100, autocast: torch.dtype | None = None) -> list[tuple]:
    """Shape and format of every tensor that `run` saves on fakes for `device`."""
    saved: list[tuple] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with simulate(device), PlanningMode(device), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        with torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None):
            output = run()
        output.sum().backward()
    return saved


def attend(dtype=FP16, mask=None, dropout=0.0, heads=4, size=64):
    query = torch.empty(2, 40, 4, size, dtype=dtype, requires_grad=True).transpose(1, 2)
    key = torch.empty(2, 40, heads, size, dtype=dtype, requires_grad=True).transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, key, mask and mask(), dropout, enable_gqa=heads != 4)


QKVO = [((2, 4, 40, 64), FP16)] * 4
SCALARS = [((), torch.int64)] * 2


def test_what_attention_keeps():
    sums, random = [((2, 4, 40), FP32)], [((2,), torch.uint64), ((), torch.uint64)]
    assert sorted(saved_by(attend), key=str) == sorted(QKVO + sums + random, key=str)
    assert sorted(saved_by(attend, V100), key=str) == sorted([*QKVO, ((2, 4, 64), FP32), *SCALARS], key=str)
    assert sorted(saved_by(attend, H100), key=str) == sorted([*QKVO, ((2, 4, 40, 1), FP32), *SCALARS], key=str)
    # heads of 60 are padded to 64 before the flash kernel
    assert saved_by(lambda: attend(size=60)).count(((2, 4, 40, 64), FP16)) == 4
    grouped = saved_by(lambda: attend(heads=2))
    assert grouped.count(((2, 2, 40, 64), FP16)) == 2
    assert grouped.count(((2, 4, 40, 64), FP16)) == 2


@pytest.mark.parametrize("kind", ["pairs", "keys", "added"])
def test_a_mask_is_kept_in_the_scores_format(kind):
    masks = {"pairs": lambda: torch.ones(2, 1, 40, 40, dtype=torch.bool),
             "keys": lambda: torch.ones(2, 1, 1, 40, dtype=torch.bool), "added": lambda: torch.empty(40, 40).half()}
    assert ((2, 4, 40, 40), FP16) in saved_by(lambda: attend(mask=masks[kind]))
    with simulate(A100), PlanningMode(A100), Tracker() as tracker:
        attend(mask=masks[kind])
    copies = [a.bytes for a in tracker.allocations if a.dtype == "float16" and "where" in a.op]
    assert sum(copies) == {"pairs": 2 * 40 * 40 * 2, "keys": 2 * 40 * 2, "added": 0}[kind]


def test_without_a_fused_kernel_the_scores_are_kept_in_fp32():
    with sdpa_kernel(SDPBackend.MATH):
        saved = saved_by(lambda: attend(dropout=0.1, mask=lambda: torch.ones(40, 40, dtype=torch.bool)))
    assert ((2, 4, 40, 40), torch.bool) in saved  # dropout's
    assert saved.count(((2, 4, 40, 40), FP32)) + saved.count(((8, 40, 40), FP32)) == 2
    with sdpa_kernel(SDPBackend.MATH), simulate(A100), PlanningMode(A100), Tracker() as tracker:
        attend(FP32, mask=lambda: torch.empty(40, 40))
    assert not any(op.name == "aten.add.Tensor" for op in tracker.ops)  # the mask is added in place


def test_dropout_keeps_a_byte_for_each_element():
    assert saved_by(lambda: F.dropout(torch.empty(4, 8, requires_grad=True), 0.1)) == [((4, 8), torch.bool)]
    for rate, training in ((0.0, True), (0.1, False), (1.0, True)):
        saved = saved_by(lambda r=rate, t=training: F.dropout(torch.empty(4, 8, requires_grad=True), r, t) + 0)
        assert ((4, 8), torch.bool) not in saved


def test_norms_keep_fp32_statistics_of_half_precision():
    weight = ((8,), BF16)
    for norm, others in (
        (lambda x: F.layer_norm(x, (8,), x[0], x[1]), 2), (lambda x: F.rms_norm(x, (8,), x[0]), 1),
    ):
        saved = saved_by(lambda n=norm: n(torch.empty(4, 8, dtype=BF16, requires_grad=True)))
        assert saved.count(((4, 1), FP32)) == (2 if others == 2 else 1)
        assert ((4, 8), BF16) in saved
        assert weight in saved
        assert ((4, 8), FP32) not in saved


def test_fp16_scores_become_fp32_weights_with_no_copy_between():
    def copies(dtype: torch.dtype) -> int:
        with simulate(A100), PlanningMode(A100), Tracker() as tracker:
            torch.empty(4, 8, dtype=dtype, requires_grad=True).softmax(-1, dtype=FP32).sum().backward()
        return sum(op.name == "aten._to_copy.default" for op in tracker.ops)

    assert copies(FP16) == 0
    assert copies(BF16) == 2


def test_grouped_products_have_shapes_in_every_format():
    for device in (A100, CPU):
        with simulate(device), PlanningMode(device):
            x, w = torch.empty(40, 16, requires_grad=True), torch.empty(4, 16, 24, requires_grad=True)
            y = torch._grouped_mm(x, w, offs=torch.empty(4, dtype=torch.int32))
            y.sum().backward()
            assert (y.shape, x.grad.shape, w.grad.shape) == ((40, 24), x.shape, w.shape)


def test_gradients_are_clipped_in_one_loop():
    with simulate(A100), PlanningMode(A100), Tracker() as tracker:
        parameters = [nn.Parameter(torch.empty(4, 4)) for _ in range(3)]
        for parameter in parameters:
            parameter.grad = torch.empty(4, 4)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    names = [op.name for op in tracker.ops]
    assert names.count("aten._foreach_norm.Scalar") == names.count("aten._foreach_mul_.Tensor") == 1


def test_scratch_follows_the_kernels_formulas():
    with simulate(A100), PlanningMode(A100), Tracker(scratch=scratch) as tracker:
        attend(heads=2).sum().backward()
    sizes = {a.op: a.bytes for a in tracker.allocations if a.dtype == "uint8"}
    rows = 2 * 4 * 40
    assert sizes["aten._scaled_dot_product_flash_attention_backward.default"] == (
        rows * 64 * 4 + rows * 4 + 2 * (2 * 40 * 4 * 64) * 2)
