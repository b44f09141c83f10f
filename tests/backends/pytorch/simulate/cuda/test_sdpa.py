"""Which attention kernel a CUDA device takes: the rules, one by one, as torch's sources state them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.backends.pytorch.simulate.target_cases import A100, ADA, BF16, FP16, FP32, H100, T4, V100, gpu
from tightfit.backends.pytorch.simulate.cuda.sdpa import Call, allowed_kernels, choose, obstacles, priority
from tightfit.errors import ModelError

ALL = ("flash", "efficient", "cudnn", "math")
SHAPE = (2, 8, 64, 64)


def called(
    query: tuple[int, ...] = SHAPE, key: tuple[int, ...] = SHAPE, value: tuple[int, ...] = SHAPE,
    dtypes: tuple[torch.dtype, ...] = (BF16,) * 3, mask: tuple[int, ...] | None = None, *, dense: bool = True,
    mask_dense: bool = True, learns: bool = True, mask_learns: bool = False, **rest,
) -> Call:  # fmt: skip
    """A call on tensors of these shapes and formats. dense: whether their last dimensions have stride 1."""
    def made(shape: tuple[int, ...], dtype: torch.dtype, rows: bool, learns: bool) -> torch.Tensor:
        tensor = torch.empty(*shape, 1 if rows else 2, dtype=dtype, device="meta", requires_grad=learns)
        return tensor[..., 0]

    q, k, v = (made(shape, dtype, dense, learns) for shape, dtype in zip((query, key, value), dtypes, strict=True))
    return Call(q, k, v, None if mask is None else made(mask, BF16, mask_dense, mask_learns), **rest)


def sized(head: int, value: int | None = None, length: int = 64, keys: int | None = None) -> dict:
    keys = length if keys is None else keys
    return {"query": (2, 8, length, head), "key": (2, 8, keys, head), "value": (2, 8, keys, value or head)}


@pytest.mark.parametrize(
    ("kernel", "device", "change", "reason"),
    [
        ("flash", A100, {"query": SHAPE[1:]}, "four dimensions"),
        ("flash", A100, {"key": (1, *SHAPE[1:])}, "batches"),
        ("flash", A100, sized(64, length=0), "no queries"),
        ("flash", A100, {"mask": (2, 1, 64, 64)}, "a mask"),
        ("flash", A100, sized(64, 32), "differ in size"),
        ("flash", A100, sized(264), "larger than 256"),
        ("flash", T4, {"dtypes": (FP16,) * 3}, "before compute capability 8.0"),
        ("flash", ADA, sized(224), "little shared memory"),
        ("flash", gpu(12), {**sized(256), "dropout": 0.1}, "little shared memory"),
        ("flash", A100, {**sized(64, keys=32), "causal": True}, "another length"),
        ("flash", A100, {"dtypes": (FP32,) * 3}, "half precision"),
        ("flash", A100, {"dtypes": (BF16, BF16, FP16)}, "half precision"),
        ("flash", A100, {"key": (2, 2, 64, 64), "value": (2, 2, 64, 64)}, "head counts"),
        ("flash", A100, {"key": (2, 3, 64, 64), "value": (2, 3, 64, 64), "grouped": True}, "head counts"),
        ("flash", A100, {"key": (2, 4, 64, 64), "value": (2, 2, 64, 64), "grouped": True}, "head counts"),
        ("flash", A100, {"dense": False}, "not contiguous"),
        ("efficient", A100, {**sized(64), "key": (2, 8, 64, 32)}, "query and key differ"),
        ("efficient", A100, sized(60), "multiple of 8"),
        ("efficient", A100, {**sized(62), "dtypes": (FP32,) * 3}, "multiple of 4"),
        ("efficient", V100, {"dtypes": (BF16,) * 3}, "a format"),
        ("efficient", A100, {"dtypes": (torch.float64,) * 3}, "a format"),
        ("efficient", A100, {"key": (2, 2, 64, 64), "value": (2, 2, 64, 64), "grouped": True}, "head counts"),
        ("efficient", A100, {"mask": (2, 1, 64, 64), "mask_dense": False}, "not contiguous"),
        ("cudnn", T4, {"dtypes": (FP16,) * 3}, "before compute capability 8.0"),
        ("cudnn", A100, {"dtypes": (FP32,) * 3}, "half precision"),
        ("cudnn", A100, {"mask": (2, 1, 64, 64), "mask_learns": True}, "learns"),
        ("cudnn", A100, {"mask": (3, 1, 64, 64)}, "does not fit"),
        ("cudnn", A100, sized(136), "larger than 128"),
        ("cudnn", H100, sized(264), "larger than 256"),
        ("cudnn", A100, sized(60), "multiple of 8"),
        ("cudnn", A100, sized(64, keys=1), "one key"),
        ("cudnn", A100, {"dropout": 0.1}, "multiple of 1/16"),
    ],
)
def test_what_a_kernel_cannot_serve(kernel, device, change, reason):
    usual = {"dtypes": (FP16,) * 3}
    assert obstacles(kernel, called(**usual), A100, (2, 13)) == []
    found = obstacles(kernel, called(**{**usual, **change}), device, (2, 13))
    assert len(found) == 1, found
    assert reason in found[0]


@pytest.mark.parametrize(
    ("kernel", "device", "change"),
    [
        ("flash", ADA, sized(192)),
        ("flash", ADA, sized(256)),
        ("flash", ADA, {**sized(224), "learns": False}),
        ("flash", A100, {**sized(224), "dropout": 0.1}),
        ("flash", A100, {"key": (2, 2, 64, 64), "value": (2, 2, 64, 64), "grouped": True}),
        ("flash", A100, sized(60)),
        ("efficient", V100, {"dtypes": (FP32,) * 3, **sized(63)}),
        ("efficient", A100, sized(64, 128)),
        ("cudnn", H100, sized(256)),
        ("cudnn", gpu(10), sized(192, 128)),
        ("cudnn", H100, {"dropout": 0.125}),
        ("cudnn", H100, {"mask": (2, 1, 1, 64)}),
    ],
)
def test_what_a_kernel_can_serve(kernel, device, change):
    assert obstacles(kernel, called(**{"dtypes": (FP16,) * 3, **change}), device, (2, 13)) == []


@pytest.mark.parametrize(
    ("device", "change", "kernel"),
    [
        (A100, {}, "flash"),
        (H100, {}, "cudnn"),
        (gpu(10), {}, "cudnn"),
        (gpu(12), {}, "flash"),
        (V100, {"dtypes": (FP16,) * 3}, "efficient"),
        (V100, {}, "math"),
        (T4, {"dtypes": (FP32,) * 3}, "efficient"),
        (A100, {"mask": (2, 1, 64, 64)}, "efficient"),
        (H100, {"mask": (2, 1, 64, 64)}, "cudnn"),
        (H100, {"dtypes": (FP32,) * 3}, "efficient"),
        (A100, {"mask": (2, 1, 64, 64), **sized(60)}, "math"),
    ],
)
def test_the_first_kernel_in_the_devices_order_that_can_serve(device, change, kernel):
    assert choose(called(**change), device, ALL, (2, 13)) == kernel


def test_cudnn_takes_any_dropout_before_torch_2_12():
    call = called(dropout=0.1)
    assert choose(call, H100, ALL, (2, 11)) == "cudnn"
    assert choose(call, H100, ALL, (2, 12)) == "flash"


def test_only_allowed_kernels_are_chosen():
    assert choose(called(), A100, ["efficient", "math"], (2, 13)) == "efficient"
    with pytest.raises(ModelError, match=r"flash: a mask.*attention\.kernel=auto"):
        choose(called(mask=(2, 1, 64, 64)), A100, ["flash"], (2, 13))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        assert allowed_kernels() == {"math", "cudnn"}
    assert allowed_kernels() == set(ALL)
    assert priority(A100)[-1] == "cudnn"
