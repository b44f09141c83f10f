"""What CUDA kernels take while they run, against sizes worked out by hand from the rules of torch's source."""

from __future__ import annotations

import torch
import torch.nn.attention.varlen  # which registers its ops

from tests.backends.pytorch.simulate.target_cases import BF16
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


def flash_backward(query, key):
    sums, none = torch.empty(query.shape[:3]), torch.empty(0)
    return (aten._scaled_dot_product_flash_attention_backward.default, torch.empty_like(query), query, key,
            torch.empty_like(key), torch.empty_like(query), sums, none, none, query.shape[2], key.shape[2], 0.0, True,
            none, none)


def test_flash_gathers_gradients_of_queries_in_fp32():
    assert taken(lambda: flash_backward(heads(), heads())) == 2 * 12 * 512 * (64 + 1) * 4


def test_flash_expands_what_heads_share():
    alone = taken(lambda: flash_backward(heads(), heads()))
    assert taken(lambda: flash_backward(heads(), heads(count=4))) == alone + 2 * (2 * 12 * 512 * 64) * 2


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


def test_a_safe_softmax_looks_for_rows_without_any_score():
    assert taken(lambda: (aten._safe_softmax.default, torch.empty(16, 32), -1)) == 16 * 32 + 16 + 2 * 4


def cudnn_backward():
    query, none, seed = heads(), torch.empty(0), torch.empty((), dtype=torch.int64)
    return (aten._scaled_dot_product_cudnn_attention_backward.default, torch.empty_like(query), query, query, query,
            torch.empty_like(query), torch.empty(2, 12, 512, 1), seed, seed, none, none, none, 512, 512, 0.0, True)


def test_cudnns_frontend_gathers_gradients_of_queries_in_fp32():
    with PlanningMode(A100):
        func, *args = cudnn_backward()
        assert scratch(func, args, {}, ()) == 2 * 12 * 512 * (64 + 1) * 4


def test_every_formula_is_of_an_op_there_is():
    named = [name.split("::") for name in FORMULAS]
    assert [packet for space, packet in named if not hasattr(getattr(torch.ops, space), packet)] == []


def test_ops_without_a_formula_take_nothing():
    assert taken(lambda: (aten.add.Tensor, torch.empty(4, dtype=BF16), torch.empty(4))) == 0
