"""What the CPU's kernels take while they run: predicted from shapes, against the allocations of the real op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from tightfit.backends.pytorch.cpu_target.products import MOST_VALUES, MOST_WORK, STEP, cut
from tightfit.backends.pytorch.cpu_target.scratch import FORMULAS, scratch

aten = torch.ops.aten
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Called = tuple[Any, ...]

NUMBERS = 16
"""Bytes that Python's numbers take as they meet a tensor, which are left out."""


@pytest.fixture(params=[(FP32, 1), (BF16, 1), (BF16, 2), (FP16, 2)], ids=["fp32", "bf16", "bf16, threads", "fp16"])
def _settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """The format of tensors that name none, and how many threads a kernel has."""
    before = torch.get_default_dtype(), torch.get_num_threads()
    dtype, threads = request.param
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    yield
    torch.set_default_dtype(before[0])
    torch.set_num_threads(before[1])


def predicted(func: Any, args: Called) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, args)
        return scratch(func, fake, {}, func(*fake))


def taken(func: Any, args: Called) -> int:
    """The most that a real run holds at once beyond what it leaves."""
    func(*args)  # what a kernel keeps for ever is not its passing memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = func(*args)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = list(accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))
    del result
    return max(live) - max(live[-1], 0)


def columns(*shape: int) -> Tensor:
    """Zeros whose last two dimensions lie the other way around."""
    return torch.zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def product(rows: int, inner: int, across: int) -> Called:
    return aten.mm.default, torch.zeros(rows, inner), torch.zeros(inner, across)


def attention(queries: int, keys: int, size: int) -> Callable[[], Called]:
    def make() -> Called:
        query, key = (torch.zeros(2, length, 3, size).transpose(1, 2) for length in (queries, keys))
        return aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, key

    return make


def attention_backward(queries: int, keys: int, size: int) -> Callable[[], Called]:
    def make() -> Called:
        func, query, key, value = attention(queries, keys, size)()
        output, sums = func(query, key, value)
        func = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return func, torch.zeros_like(output), query, key, value, output, sums, 0.0, False

    return make


def layer_norm_backward() -> Called:
    values, ones = torch.zeros(300, 64), torch.ones(64)
    _, mean, deviation = aten.native_layer_norm.default(values, [64], ones, ones, 1e-5)
    func = aten.native_layer_norm_backward.default
    return func, columns(300, 64), values, [64], mean, deviation, ones, ones, [True, True, True]


def patches(image: int, patch: int) -> Called:
    images, weight, bias = torch.zeros(10, 3, image, image), torch.zeros(16, 3, patch, patch), torch.zeros(16)
    return aten.convolution.default, images, weight, bias, [patch] * 2, [0, 0], [1, 1], False, [0, 0], 1


def patches_backward(image: int, patch: int) -> Called:
    _, images, weight, _, *rest = patches(image, patch)
    gradient = torch.zeros(10, 16, image // patch, image // patch)
    return aten.convolution_backward.default, gradient, images, weight, [16], *rest, [False, True, True]


def rows(count: int, width: int) -> Tensor:
    return torch.arange(count)[:, None].expand(count, width)


OPS: dict[str, Callable[[], Called]] = {
    **{f"mm of {sides}": partial(product, *sides)
       for sides in ((64, 64, 64), (576, 64, 500), (1100, 1030, 200), (33, 2500, 300))},
    "mm of columns": lambda: (aten.mm.default, columns(96, 576), torch.zeros(576, 80)),
    "mm with a gap": lambda: (aten.mm.default, torch.zeros(96, 600)[:, ::2], torch.zeros(300, 80)),
    "addmm": lambda: (aten.addmm.default, torch.zeros(80), torch.zeros(96, 64), columns(64, 80)),
    "bmm": lambda: (aten.bmm.default, torch.zeros(24, 96, 16), columns(24, 16, 96)),
    "bmm of slices": lambda: (aten.bmm.default, torch.zeros(24, 96, 32)[:, :, :16], torch.zeros(24, 16, 96)),
    "attention": attention(96, 96, 16),
    "attention, odd": attention(97, 101, 33),
    "attention, few queries": attention(5, 200, 32),
    "attention, long": attention(800, 600, 16),
    "attention backward": attention_backward(96, 96, 16),
    "attention backward, long": attention_backward(200, 600, 24),
    "convolution of 16": lambda: patches(64, 16),
    "convolution of 8": lambda: patches(64, 8),
    "convolution backward of 8": lambda: patches_backward(64, 8),
    "layer norm backward": layer_norm_backward,
    "softmax of columns": lambda: (aten._softmax.default, columns(80, 100), -1, False),
    "softmax backward": lambda: (
        aten._softmax_backward_data.default, columns(2, 80, 9), torch.zeros(2, 80, 9), -1, torch.get_default_dtype(),
    ),
    "logsumexp": lambda: (aten.logsumexp.default, torch.zeros(60, 70), [-1]),
    "mean": lambda: (aten.mean.dim, torch.zeros(60, 70), [-1]),
    "clone of columns": lambda: (aten.clone.default, columns(80, 100)),
    "into rows": lambda: (aten.copy_.default, torch.zeros(80, 100), columns(80, 100)),
    "masked_fill": lambda: (aten.masked_fill.Scalar, columns(80, 100), torch.ones(80, 100, dtype=torch.bool), 1.0),
    "add": lambda: (aten.add.Tensor, torch.zeros(80, 100), columns(80, 100)),
    "add of fp64": lambda: (aten.add.Tensor, torch.zeros(80, 100), torch.zeros(100, dtype=torch.float64)),
    "mul by a number": lambda: (aten.mul.Tensor, torch.zeros(80, 100), 2.0),
    "where": lambda: (aten.where.self, torch.ones(80, 1, dtype=torch.bool), torch.zeros(80, 9), torch.zeros(())),
    "index_select of the last": lambda: (aten.index_select.default, columns(6, 96, 80), 2, torch.arange(9)),
    "index_select of the second": lambda: (aten.index_select.default, columns(6, 96, 80), 1, torch.arange(9)),
    "index_add of rows": lambda: (aten.index_add.default, torch.zeros(90, 64), 0, torch.arange(9), torch.zeros(9, 64)),
    "index_add of the middle": lambda: (
        aten.index_add.default, torch.zeros(5, 90, 6), 1, torch.arange(9), torch.zeros(5, 9, 6),
    ),
    "index_add of the last": lambda: (
        aten.index_add.default, torch.zeros(64, 90), 1, torch.arange(9), torch.zeros(64, 9),
    ),
    "scatter_add": lambda: (
        aten.scatter_add.default, torch.zeros(90, 64), 0, torch.zeros(9, 64, dtype=torch.int64), torch.zeros(9, 64),
    ),
    "scatter_add of rows": lambda: (aten.scatter_add.default, torch.zeros(90, 64), 0, rows(9, 64), torch.zeros(9, 64)),
    "gather": lambda: (aten.gather.default, torch.zeros(90, 64), 0, torch.zeros(9, 64, dtype=torch.int64)),
    "gather of rows": lambda: (aten.gather.default, torch.zeros(90, 64), 0, rows(9, 64)),
    "bilinear": lambda: (aten.upsample_bilinear2d.default, torch.zeros(2, 3, 8, 8), [16, 16], False),
    "nearest, one channel": lambda: (aten.upsample_nearest2d.default, torch.zeros(2, 1, 2, 2), [2, 2]),
    "embedding backward": lambda: (
        aten.embedding_dense_backward.default, columns(4, 9, 64), torch.zeros(4, 9, dtype=torch.int64), 50, -1, False,
    ),
    "_foreach_add": lambda: (
        aten._foreach_add.List, [torch.zeros(9), torch.zeros(80)], [torch.zeros(9), torch.zeros(80).double()],
    ),
}  # fmt: skip


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("name", OPS)
def test_an_op_takes_what_is_predicted(name: str) -> None:
    func, args = split(OPS[name]())
    assert predicted(func, args) == pytest.approx(taken(func, args), abs=NUMBERS)


def test_the_ops_tried_take_something() -> None:
    """So that a prediction of nothing would not pass."""
    with_memory = [name for name, make in OPS.items() if taken(*split(make())) > 1000]
    assert len(with_memory) > 12


def split(made: Called) -> tuple[Any, Called]:
    return made[0], made[1:]


def test_a_large_product_is_tried_at_a_size_with_the_same_blocks_at_its_ends() -> None:
    assert cut(1, 1100, 4200, 1030) == (1, 1100, 4200, 1030)
    sides = 1, 8192, 768, 50257
    less = cut(*sides)
    assert math.prod(less) <= MOST_WORK
    assert less[1] * less[3] <= MOST_VALUES
    assert [(a - b) % STEP for a, b in zip(sides, less, strict=True)] == [0, 0, 0, 0]
    assert cut(1, 10**6, 10**6, 10**6) == (1, STEP + 10**6 % STEP, 4 * STEP + 10**6 % STEP, STEP + 10**6 % STEP)


def test_every_formula_is_that_of_an_op_that_there_is() -> None:
    assert not [name for name in FORMULAS if not hasattr(aten, name)]
