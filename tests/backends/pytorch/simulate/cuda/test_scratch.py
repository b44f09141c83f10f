"""What CUDA kernels take while they run, against sizes worked out by hand from the rules of torch's source."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen  # which registers its ops
from torch._subclasses import FakeTensorMode

from tests.backends.pytorch.simulate.target_cases import BF16, FP16, FP32
from tightfit.backends.pytorch.simulate.cuda.scratch import FORMULAS, scratch
from tightfit.backends.pytorch.simulate.target import PlanningMode
from tightfit.devices import find_device

aten = torch.ops.aten
A100 = find_device("a100-80gb-sxm")


def taken(run) -> int:
    """What the op that `run` names with its arguments takes, called on fakes that stand for a GPU's tensors."""
    with PlanningMode(A100):
        func, *args = run()
        return scratch(func, args, {}, func(*args))


def test_a_bias_gradient_is_summed_by_many_blocks():
    # 3072 outputs of 8192 numbers: 32 x 4 threads of 4 outputs each make 24 blocks, each thread with 2048 numbers. An
    # A100 holds 108 x 2048 threads, 1728 such blocks, so that 72 share an output.
    many = 4 * 3072 * 72 * 32 * 4 + 4 * 24
    assert taken(lambda: (aten.sum.dim_IntList, torch.empty(8192, 3072), [0])) == many
    assert taken(lambda: (aten.sum.dim_IntList, torch.empty(8, 1024, 3072), [0, -2], True)) == many


def test_what_a_block_sums_alone_takes_nothing():
    for shape, over in (((8192, 768), [1]), ((8, 1024, 768), [0]), ((128, 64), [0]), ((0, 4), [0]), ((64, 64), None)):
        assert taken(lambda shape=shape, over=over: (aten.sum.dim_IntList, torch.empty(shape), over)) == 0


def heads(count=12, length=512, size=64, dtype=BF16, batch=2):
    """(B, H, T, D) as a model makes it, with positions outside of heads."""
    return torch.empty(batch, length, count, size, dtype=dtype).transpose(1, 2)


def flash_backward(query, key, gradient=None):
    sums, none = torch.empty(query.shape[:3]), torch.empty(0)
    gradient = torch.empty_like(query) if gradient is None else gradient
    return (aten._scaled_dot_product_flash_attention_backward.default, gradient, query, key, torch.empty_like(key),
            torch.empty_like(query), sums, none, none, query.shape[2], key.shape[2], 0.0, True, none, none)


def test_flash_gathers_gradients_of_queries_in_fp32():
    assert taken(lambda: flash_backward(heads(), heads())) == 2 * 12 * 512 * (64 + 1) * 4


def test_flash_expands_what_heads_share():
    alone = taken(lambda: flash_backward(heads(), heads()))
    assert taken(lambda: flash_backward(heads(), heads(count=4))) == alone + 2 * (2 * 12 * 512 * 64) * 2


def test_flash_copies_a_gradient_that_lies_otherwise():
    alone = taken(lambda: flash_backward(heads(), heads()))
    spread = taken(lambda: flash_backward(heads(), heads(), torch.empty(2, 12, 512, 64, dtype=BF16)))
    assert spread == alone + 2 * 12 * 512 * 64 * 2


def test_packed_documents_gather_the_same():
    def backward():
        packed, starts = torch.empty(1000, 8, 64, dtype=BF16), torch.empty(6, dtype=torch.int32)
        return (torch.ops.torch_attn._varlen_attn_backward.default, packed, packed, packed, packed, packed,
                torch.empty(8, 1000), starts, starts, 512, 512, True, torch.empty(2, dtype=torch.uint64))

    assert taken(backward) == 1000 * 8 * (64 + 1) * 4


def efficient_backward(dtype, size, dropout=0.0):
    query, none = heads(size=size, dtype=dtype), torch.empty(())
    return (aten._scaled_dot_product_efficient_attention_backward.default, torch.empty_like(query), query, query, query,
            None, torch.empty_like(query), torch.empty(2, 12, 512), none, none, dropout, [True, True, True, False])


def test_the_efficient_kernel_gathers_them_too():
    assert taken(lambda: efficient_backward(BF16, 64)) == 2 * 12 * 512 * (64 + 1) * 4


def embedding_backward(count, rows, width, dtype=FP32):
    gradient, ids = torch.empty(count, width, dtype=dtype), torch.empty(count, dtype=torch.int64)
    return aten.embedding_dense_backward.default, gradient, ids, rows, -1, False


def test_an_embeddings_gradient_sorts_its_indices():
    assert taken(lambda: embedding_backward(3072, 50257, 768)) == 0
    assert taken(lambda: embedding_backward(8192, 50257, 768)) == (819 + 8192) * 768 * 4 + 5 * 8192 * 8


def norm_backward(rows, width):
    whole, vector, sums = torch.empty(rows, width), torch.empty(width), torch.empty(rows, 1)
    return aten.native_layer_norm_backward.default, whole, whole, [width], sums, sums, vector, vector, [True] * 3


def test_other_passing_memory():
    square = (16, 32)
    assert taken(lambda: (aten._softmax.default, torch.empty(32, 16).t(), -1, False)) == 16 * 32 * 4
    assert taken(lambda: (aten._safe_softmax.default, torch.empty(square), -1)) == 16 * 32 + 16 + 2 * 4
    assert taken(lambda: (aten.logsumexp.default, torch.empty(square), [-1])) == 16 * 32 * 4 + 16 * 4
    assert taken(lambda: (aten.where.self, torch.empty(square, dtype=torch.bool), torch.empty(square, dtype=BF16),
                          torch.empty(()))) == 0
    assert taken(lambda: (aten.where.self, torch.empty(square, dtype=torch.bool), torch.empty(square, dtype=BF16),
                          torch.empty(square))) == 16 * 32 * 4


def test_matrices_that_blas_cannot_read_are_copied():
    assert taken(lambda: (aten.bmm.default, torch.empty(2, 8, 4).mT, torch.empty(2, 8, 16))) == 0
    repeated = taken(lambda: (aten.bmm.default, torch.empty(2, 1, 8).expand(2, 4, 8), torch.empty(2, 8, 16)))
    assert repeated == 2 * 4 * 8 * 4
    with_gaps = taken(lambda: (aten.mm.default, torch.empty_strided((4, 8), (32, 2)), torch.empty(8, 16)))
    assert with_gaps == 4 * 8 * 4
    factors = (4, 8), (8, 16)  # the bias of addmm is no factor
    bias = taken(lambda: (aten.addmm.default, torch.empty(1, 16).expand(4, 16), *map(torch.empty, factors)))
    assert bias == 0


def cudnn_backward():
    query, none, seed = heads(), torch.empty(0), torch.empty((), dtype=torch.int64)
    return (aten._scaled_dot_product_cudnn_attention_backward.default, torch.empty_like(query), query, query, query,
            torch.empty_like(query), torch.empty(2, 12, 512, 1), seed, seed, none, none, none, 512, 512, 0.0, True)


def test_cudnns_frontend_gathers_gradients_of_queries_in_fp32():
    with PlanningMode(A100):
        func, *args = cudnn_backward()
        assert scratch(func, args, {}, ()) == 2 * 12 * 512 * (64 + 1) * 4


def exists(name: str) -> bool:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, space), packet, None)
    return found is not None and (not overload or overload in found.overloads())


def test_every_formula_is_of_an_op_there_is():
    assert [name for name in FORMULAS if not exists(name)] == []


def example_calls():
    """A call of every op that has a formula, by its key."""
    whole, square = torch.empty(64, 32), torch.empty(32, 32)
    vector, sums, batch = torch.empty(32), torch.empty(64, 1), torch.empty(2, 32, 32)
    calls = {name: (getattr(aten, name).default, whole, -1, False) for name in ("_softmax", "_log_softmax")}
    calls |= {name: (getattr(aten, name).default, whole, whole, -1, FP32)
              for name in ("_softmax_backward_data", "_log_softmax_backward_data")}
    calls |= {
        "logsumexp": (aten.logsumexp.default, whole, [0]),
        "native_layer_norm": (aten.native_layer_norm.default, whole, [32], vector, vector, 1e-5),
        "native_layer_norm_backward": norm_backward(64, 32),
        "_fused_rms_norm": (aten._fused_rms_norm.default, whole, [32], vector, 1e-5),
        "_fused_rms_norm_backward":
            (aten._fused_rms_norm_backward.default, whole, whole, [32], sums, vector, [True] * 2),
        "sum": (aten.sum.dim_IntList, whole, [0]),
        "mm": (aten.mm.default, whole, square),
        "addmm": (aten.addmm.default, vector, whole, square),
        "bmm": (aten.bmm.default, batch, batch),
        "baddbmm": (aten.baddbmm.default, batch, batch, batch),
        "where.self": (aten.where.self, whole > 0, whole, whole),
        "_safe_softmax": (aten._safe_softmax.default, whole, 0),
        "embedding_dense_backward": embedding_backward(8192, 64, 32),
        "_scaled_dot_product_flash_attention_backward": flash_backward(heads(), heads()),
        "_scaled_dot_product_efficient_attention_backward": efficient_backward(FP16, 64),
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward(),
    }  # fmt: skip
    return {f"aten::{name}": call for name, call in calls.items()}


@pytest.mark.parametrize("mode", [lambda: PlanningMode(A100), FakeTensorMode])
def test_every_formula_gives_bytes_on_fake_tensors_of_any_kind(mode):
    with mode():
        calls = example_calls()
        assert calls.keys() | {"torch_attn::_varlen_attn_backward"} == FORMULAS.keys()
        for name, (func, *args) in calls.items():
            result = args[0] if "cudnn" in name or "_fused_rms" in name else func(*args)
            size = scratch(func, args, {}, result)
            assert type(size) is int, name
            assert size >= 0, name


def test_ops_without_a_formula_take_nothing():
    assert taken(lambda: (aten.add.Tensor, torch.empty(4, dtype=BF16), torch.empty(4))) == 0
