"""CUDA's autocast on fake tensors gives the formats that torch's documentation of it lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backends.pytorch.simulate.target_cases import A100, BF16, FP16, FP32
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.cuda.autocast import HEADER, Policy, cuda_policies
from tightfit.backends.pytorch.simulate.target import PlanningMode, simulate
from tightfit.errors import ModelError

HALF_OPS = {
    "matmul": lambda x: x @ x, "bmm": lambda x: torch.bmm(x[None], x[None]), "addmm": lambda x: torch.addmm(x, x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]), "mv": lambda x: x.mv(x[0]),
    "addmv": lambda x: torch.addmv(x[0], x, x[0]), "addr": lambda x: torch.addr(x, x[0], x[0]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x), "linear": lambda x: F.linear(x, x, x[0]),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: F.conv2d(x[None, :, :, None], x[:, :, None, None]),
    "prelu": lambda x: F.prelu(x, x[0, :1]), "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "lstm_cell": lambda x: nn.LSTMCell(8, 2)(x)[0],
}
FP32_OPS = {
    "exp": torch.exp, "log": torch.log, "pow": lambda x: x**2.5, "rpow": lambda x: 2.0**x, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "softplus": F.softplus, "tan": torch.tan,
    "layer_norm": lambda x: F.layer_norm(x, (8,)), "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2), "norm": lambda x: x.norm(), "norm over": lambda x: x.norm(dim=1),
    "vector_norm": torch.linalg.vector_norm, "sum": torch.sum, "sum over": lambda x: x.sum(1), "prod": torch.prod,
    "cumsum": lambda x: x.cumsum(0), "cumprod": lambda x: x.cumprod(0), "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "mse_loss": lambda x: F.mse_loss(x, x), "l1_loss": lambda x: F.l1_loss(x, x), "kl_div": lambda x: F.kl_div(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x), "cdist": lambda x: torch.cdist(x, x),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(8, dtype=torch.long)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
}
UNLISTED = {
    "relu": F.relu, "gelu": F.gelu, "add": lambda x: x + x, "dropout": lambda x: F.dropout(x, 0.1),
    "mean": torch.mean, "stack": lambda x: torch.stack([x, x]), "embedding": lambda x: F.embedding(x[0].long(), x),
    # on the CPU's list alone
    "trace": torch.trace, "quantile": lambda x: x, "avg_pool3d": lambda x: F.avg_pool3d(x[None, None], 1),
}
PROMOTED = {
    "addcmul": lambda x, y: torch.addcmul(x, x, y), "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "atan2": torch.atan2, "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "dot": lambda x, y: torch.dot(x[0], y[0]), "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(8, 8, dtype=torch.long), y),
    "index_put": lambda x, y: x.index_put((torch.zeros(8, dtype=torch.long),), y),
}


def results(dtype: torch.dtype, ops: dict, *inputs: torch.dtype) -> dict[str, torch.dtype]:
    """The format of each op's result on fakes for an A100 under autocast to `dtype`."""
    with simulate(A100), PlanningMode(A100), torch.autocast("cpu", dtype=dtype):
        return {name: op(*(torch.empty(8, 8, dtype=dtype) for dtype in inputs)).dtype for name, op in ops.items()}


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_autocast_gives_the_formats_of_cudas_lists(dtype):
    with pytest.warns(UserWarning, match="reduction: 'mean'"):  # kl_div's own
        found = results(dtype, FP32_OPS, dtype)
    if "aten::rms_norm" not in cuda_policies():  # before torch 2.12
        assert found.pop("rms_norm") == dtype
    assert set(found.values()) == {FP32}
    for inputs in (dtype, FP32):
        assert results(dtype, HALF_OPS, inputs) == dict.fromkeys(HALF_OPS, dtype)
        assert results(dtype, UNLISTED, inputs) == dict.fromkeys(UNLISTED, inputs)
    assert set(results(dtype, PROMOTED, dtype, FP32).values()) == {FP32}
    assert set(results(dtype, PROMOTED, FP32, dtype).values()) == {FP32}
    assert set(results(dtype, PROMOTED, dtype, dtype).values()) == {dtype}
    assert set(results(dtype, {"exp": torch.exp, "mm": lambda x: x @ x}, torch.float64).values()) == {torch.float64}


def test_a_format_that_is_asked_for_stays():
    ops = {"softmax": lambda x: x.softmax(-1, dtype=BF16), "sum": lambda x: x.sum(dtype=FP16),
           "norm": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64)}
    assert results(BF16, ops, BF16) == {"softmax": BF16, "sum": FP16, "norm": torch.float64}


def test_the_list_is_that_of_the_dispatcher(tmp_path):
    policies = cuda_policies()
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    own = {name for name in registered if name.startswith("aten::")}
    assert set(policies) == own - {"aten::_cudnn_rnn"}  # in a build for CUDA, and for its tensors alone
    assert set(policies.values()) == set(Policy)
    assert policies["aten::pow.Tensor_Scalar"] is Policy.FP32
    assert policies["aten::norm.ScalarOpt_dim"] is Policy.FP32
    shorter = tmp_path / "autocast_mode.h"
    shorter.write_text(HEADER.read_text().replace("_(rsqrt)", ""))
    assert set(policies) - set(cuda_policies(shorter)) == {"aten::rsqrt"}


def test_without_torchs_headers_the_cpus_list_stays_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("tightfit.backends.pytorch.simulate.cuda.autocast.HEADER", tmp_path / "none.h")
    with pytest.warns(UserWarning, match="without its headers"):
        found = results(BF16, {"exp": torch.exp, "mm": lambda x: x @ x}, FP32)
    assert found == {"exp": FP32, "mm": BF16}
    with pytest.warns(UserWarning, match="without its headers"):
        assert results(BF16, {"exp": torch.exp}, BF16) == {"exp": BF16}


def test_a_weight_is_cast_once_in_a_region():
    def casts(tracker: Tracker) -> int:
        return sum(op.name == "aten._to_copy.default" and op.shapes[0] == (16, 16) for op in tracker.ops)

    with simulate(A100), PlanningMode(A100):
        weight, x = nn.Parameter(torch.empty(16, 16)), torch.empty(4, 16, dtype=FP16)
        with Tracker() as tracker:
            with torch.autocast("cpu", dtype=FP16):
                y = F.linear(F.linear(x, weight), weight) @ weight
            assert casts(tracker) == 1
            y.sum().backward()
            with torch.autocast("cpu", dtype=FP16):
                F.linear(x, weight)
        assert casts(tracker) == 3  # the gradient back to fp32, and the second region's own


def test_an_op_that_is_not_safe_in_half_precision_is_refused_as_on_cuda():
    with simulate(A100), PlanningMode(A100), torch.autocast("cpu", dtype=FP16):
        x = torch.empty(4)
        with pytest.raises(ModelError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)


def test_ops_of_another_library_are_left_as_they_are():
    library = torch.library.Library("another", "DEF")
    try:
        library.define("nms(Tensor boxes) -> Tensor")
        library.impl("nms", torch.clone, "CPU")
        library.impl("nms", lambda boxes: boxes + 1, "AutocastCPU")
        with simulate(A100), torch.autocast("cpu", BF16):
            assert torch.ops.another.nms(torch.zeros(2)).tolist() == [1, 1]
    finally:
        library._destroy()
