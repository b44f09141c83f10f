"""What the CPU's kernels take while they run: predicted from shapes, against the allocations of the real op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tests.allocations import allocated
from tightfit.backends.pytorch.simulate.cpu_scratch import FORMULAS, scratch
from tightfit.backends.pytorch.techniques.adapters.quantization import DEQUANTIZE

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
    live = allocated(lambda: func(*args))
    return max(live) - max(live[-1], 0)


def columns(*shape: int) -> Tensor:
    """Zeros whose last two dimensions lie the other way around."""
    return torch.zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def places(*shape: int) -> Tensor:
    return torch.randint(0, 32, shape)


def product(rows: int, inner: int, across: int) -> Called:
    return aten.mm.default, torch.zeros(rows, inner), torch.zeros(inner, across)


def patches(image: int, patch: int) -> Called:
    images, weight, bias = torch.zeros(10, 3, image, image), torch.zeros(16, 3, patch, patch), torch.zeros(16)
    return aten.convolution.default, images, weight, bias, [patch] * 2, [0, 0], [1, 1], False, [0, 0], 1


def patches_backward(image: int, patch: int) -> Called:
    _, images, weight, _, *rest = patches(image, patch)
    gradient = torch.zeros(10, 16, image // patch, image // patch)
    return aten.convolution_backward.default, gradient, images, weight, [16], *rest, [False, True, True]


OPS: dict[str, Callable[[], Called]] = {
    **{f"mm of {sides}": partial(product, *sides)
       for sides in ((64, 64, 64), (576, 64, 500), (1100, 1030, 200), (33, 2500, 300))},
    "mm of columns": lambda: (aten.mm.default, columns(96, 576), torch.zeros(576, 80)),
    "addmm": lambda: (aten.addmm.default, torch.zeros(80), torch.zeros(96, 64), columns(64, 80)),
    "bmm": lambda: (aten.bmm.default, torch.zeros(6, 96, 64), columns(6, 64, 80)),
    "grouped_mm": lambda: (
        aten._grouped_mm.default, torch.zeros(96, 64, dtype=BF16), torch.zeros(4, 64, 80, dtype=BF16),
        torch.arange(24, 97, 24, dtype=torch.int32),
    ),
    "grouped_mm over groups": lambda: (
        aten._grouped_mm.default, columns(64, 96).to(BF16), torch.zeros(96, 80, dtype=BF16),
        torch.arange(24, 97, 24, dtype=torch.int32),
    ),
    "convolution of 16": lambda: patches(64, 16),
    "convolution of 8": lambda: patches(64, 8),
    "convolution backward of 8": lambda: patches_backward(64, 8),
    "softmax of columns": lambda: (aten._softmax.default, columns(2, 80, 9), -1, False),
    "embedding backward of a part": lambda: (
        aten.embedding_dense_backward.default, torch.zeros(4, 50, 96)[..., 32:], places(4, 50), 32, -1, False,
    ),
    "mean": lambda: (aten.mean.dim, torch.zeros(60, 70), [-1]),
    "masked_fill": lambda: (aten.masked_fill.Scalar, torch.zeros(80, 100), torch.ones(80, 100, dtype=torch.bool), 1.0),
    "add": lambda: (aten.add.Tensor, torch.zeros(80, 100), columns(80, 100)),
    "add of fp64": lambda: (aten.add.Tensor, torch.zeros(80, 100), torch.zeros(100, dtype=torch.float64)),
    "mul by a number": lambda: (aten.mul.Tensor, torch.zeros(80, 100), 2.0),
    "index_add of the middle": lambda: (
        aten.index_add.default, torch.zeros(5, 90, 6), 1, torch.arange(9), torch.zeros(5, 9, 6),
    ),
    "index_add of the last": lambda: (
        aten.index_add.default, torch.zeros(64, 90), 1, torch.arange(9), torch.zeros(64, 9),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("name", OPS)
def test_an_op_takes_what_is_predicted(name: str) -> None:
    func, args = split(OPS[name]())
    assert predicted(func, args) == pytest.approx(taken(func, args), abs=NUMBERS)


def test_the_ops_tried_take_something() -> None:
    """So that a prediction of nothing would not pass."""
    with_memory = {name for name, make in OPS.items() if taken(*split(make())) > 1000}
    assert with_memory >= {"convolution of 8", "convolution backward of 8", "softmax of columns", "add of fp64"}


def split(made: Called) -> tuple[Any, Called]:
    return made[0], made[1:]


def test_a_large_product_is_not_tried() -> None:
    huge = torch.empty(1 << 14, 1 << 14, device="meta", dtype=BF16)
    assert scratch(aten.mm.default, (huge, huge), {}, huge) == 0


def test_every_formula_is_that_of_an_op_that_there_is() -> None:
    ours = {f"dequantize_{kind}" for kind in DEQUANTIZE}
    assert not [name for name in FORMULAS if not hasattr(aten, name) and name not in ours]
