"""What dispatched ops cost: FLOPs against torch's own counter and brute force, bytes and kernels by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.architectures import TASK_OF, VOCAB, tiny_model
from tightfit.backends.pytorch.follow.op_costs import cost
from tightfit.backends.pytorch.follow.op_flops import FLOPS, attended_pairs
from tightfit.trace import OpClass

aten = torch.ops.aten
META = torch.device("meta")


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found.append((func, cost(func, args, kwargs or {}, result)))
        return result


def record(run):
    """Every op with its cost."""
    with Recorder() as recorder:
        run()
    return recorder.found


def only(run):
    """The cost of the one op of a call that runs a kernel."""
    found = [c for _, c in record(run) if c.kernels]
    assert len(found) == 1, found
    return found[0]


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


# FLOPs


def convolution(channels, groups, transposed):
    x = torch.randn(2, channels, 9, 8, requires_grad=True)
    shape = (channels, 6 // groups, 3, 2) if transposed else (6, channels // groups, 3, 2)
    weight = torch.randn(shape, requires_grad=True)
    apply = F.conv_transpose2d if transposed else F.conv2d
    return lambda: apply(x, weight, stride=2, padding=1, groups=groups).sum().backward()


RUNS = {
    "mm": lambda: torch.randn(5, 7) @ torch.randn(7, 3),
    "addmm": lambda: torch.addmm(torch.randn(3), torch.randn(5, 7), torch.randn(7, 3)),
    "bmm": lambda: torch.bmm(torch.randn(4, 5, 7), torch.randn(4, 7, 3)),
    "baddbmm": lambda: torch.baddbmm(torch.randn(4, 5, 3), torch.randn(4, 5, 7), torch.randn(4, 7, 3)),
    "convolution": convolution(4, 1, False),
    "transposed convolution": convolution(4, 1, True),
}


@pytest.mark.parametrize("name", RUNS)
def test_flops_are_those_of_torchs_counter(name):
    with FlopCounterMode(display=False) as counter:
        RUNS[name]()
    assert counter.get_total_flops() > 0
    assert sum(c.flops for _, c in record(RUNS[name])) == counter.get_total_flops()


def test_a_product_with_a_format_of_its_own_counts_as_any_other():
    a, b, into = meta(5, 7, dtype=torch.bfloat16), meta(7, 3, dtype=torch.bfloat16), meta(5, 3)
    assert cost(aten.mm.dtype, (a, b, torch.float32), {}, into).flops == 2 * 5 * 7 * 3
    assert cost(aten.addmm.dtype, (into, a, b, torch.float32), {}, into).flops == 2 * 5 * 7 * 3


def test_a_convolution_in_groups_costs_a_group_for_each_output():
    forward, backward = [c.flops for f, c in record(convolution(4, 2, False)) if "convolution" in str(f)]
    assert forward == 2 * (2 * 6 * 5 * 5) * (4 // 2 * 3 * 2)  # outputs: 2 images of 6 x 5 x 5; a filter: 2 x 3 x 2
    assert backward == 2 * forward


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_a_whole_models_flops_are_those_of_torchs_counter(name):
    model = tiny_model(name, attn_implementation="eager")

    def run():
        batch = torch.randn(2, 3, 16, 16) if name == "vit" else torch.randint(VOCAB, (2, 12))
        model(batch).logits.sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()
    assert sum(c.flops for _, c in record(run)) == counter.get_total_flops()


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_attended_pairs_are_those_a_mask_leaves(queries, keys):
    for causal, left, right in product((False, True), (-1, 0, 2, 9), (-1, 0, 1, 9)):
        seen = sum(
            (not causal or j <= i) and (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
            for i in range(queries) for j in range(keys)
        )  # fmt: skip
        assert attended_pairs(queries, keys, causal, left, right) == seen, (causal, left, right)


SDPA = {
    "flash": (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward),
    "efficient": (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward),
    "cudnn": (aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward),
}


@pytest.mark.parametrize("name", SDPA)
def test_fused_attention_costs_what_torchs_counter_says_and_half_of_it_with_a_causal_mask(name):
    from torch.utils.flop_counter import flop_registry

    query, key = meta(2, 8, 12, 16), meta(2, 4, 12, 16)  # grouped heads, which torch before 2.12 does not count
    forward, backward = SDPA[name]
    given = {"attn_bias": None, "compute_log_sumexp": True, "dropout_p": 0.0}
    names = [a.name for a in forward.default._schema.arguments]
    options = {n: given[n] for n in names if n in given}
    full = cost(forward.default, (query, key, key), {**options, "is_causal": False}, (query,)).flops
    assert full == flop_registry[forward](query, query, query, out_val=query)
    masked = cost(forward.default, (query, key, key), {**options, "is_causal": True}, (query,)).flops
    assert masked == full * (12 * 13 // 2) // (12 * 12)
    full = cost(backward.default, (query, query, key, key), {"is_causal": False}, (query, key, key)).flops
    assert full == flop_registry[backward](query, query, query, query, out_val=query)


def test_the_cpus_own_attention_counts_as_any_other():
    query, key, value = (torch.randn(2, 3, 10, 8, requires_grad=True) for _ in range(3))
    found = record(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward())
    flops = {str(f): c.flops for f, c in found if c.flops}
    pairs = 2 * 3 * (10 * 11 // 2)
    assert flops["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 2 * pairs * (8 + 8)
    assert flops["aten._scaled_dot_product_flash_attention_for_cpu_backward.default"] == 2 * pairs * 5 * 8


def test_documents_of_variable_length_attention_count_as_equally_long():
    from torch.nn.attention import varlen  # registers the op

    assert varlen is not None
    query, starts = meta(40, 4, 8), meta(5, dtype=torch.int32)  # 4 documents of 10 tokens
    args = (query, query, query, starts, starts, 40, 40, True)
    forward = cost(torch.ops.torch_attn._varlen_attn.default, args, {}, (query,))
    assert forward.flops == 2 * 4 * (4 * 10 * 11 // 2) * (8 + 8)
    assert forward.op_class is OpClass.CONTRACTION
    args = (query, query, query, query, query, meta(4, 40), starts, starts, 40, 40, True, meta(2))
    backward = cost(torch.ops.torch_attn._varlen_attn_backward.default, args, {}, (query, query, query))
    assert backward.flops == forward.flops * 5 // 2


@pytest.mark.parametrize(("a", "b", "flops"), [
    ((24, 8), (3, 8, 5), 2 * 24 * 8 * 5),  # each row meets one expert
    ((6, 24), (24, 5), 2 * 6 * 24 * 5),  # an expert's gradient: its own rows
    ((3, 6, 8), (8, 24), 2 * 6 * 8 * 24),  # each column meets one expert
    ((3, 6, 8), (3, 8, 5), 2 * 3 * 6 * 8 * 5),
])
def test_grouped_products_multiply_each_row_once(a, b, flops):
    offsets = meta(3, dtype=torch.int32)
    assert cost(aten._grouped_mm.default, (meta(*a), meta(*b), offsets), {}, meta(1)).flops == flops


def test_every_formula_is_of_an_op_that_torch_or_a_library_has():
    elsewhere = {"_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward", "grouped_mm_fallback"}
    ours = {name for name in FLOPS if not name.startswith("_flash_attn_")} - elsewhere
    missing = {name for name in ours if not hasattr(aten, name)}
    assert missing <= {"_cudnn_attention_backward", "_scaled_grouped_mm", "_weight_int8pack_mm"}


# Bytes and kernels


def test_bytes_of_a_product():
    a, b = torch.ones(5, 7, dtype=torch.bfloat16), torch.ones(7, 3, dtype=torch.bfloat16)
    found = only(lambda: torch.mm(a, b))
    assert (found.bytes_read, found.bytes_written, found.dtype) == (2 * (35 + 21), 2 * 15, "bfloat16")
    assert found.shapes == ((5, 7), (7, 3))


TABLE = torch.ones(100, 6)
ROWS = torch.tensor([[1, 2, 3, 4]])
LOGITS, LABELS = torch.zeros(5, 50), torch.tensor([1, 2, 3, 4, 5])
VECTOR = torch.ones(64)

TRAFFIC = {
    "a broadcast argument is read once": (lambda: torch.ones(4, 1).expand(4, 8).add(TABLE[:4, :1]), 16 + 16, 128),
    "in place reads and writes": (lambda: VECTOR.add_(1.0), 256, 256),
    "a copy does not read what it overwrites": (lambda: VECTOR.copy_(torch.ones(64)), 256, 256),
    "zeros of another's shape": (lambda: torch.zeros_like(VECTOR), 0, 256),
    "rows of a table": (lambda: F.embedding(ROWS, TABLE), 4 * 24 + 32, 4 * 24),
    "rows of an index": (lambda: TABLE[ROWS[0]], 4 * 24 + 32, 4 * 24),
    "the rest of a table is zeros": (
        lambda: aten.embedding_dense_backward(torch.ones(4, 6), ROWS[0], 100, -1, False), 96 + 32, 2400 + 96),
    "one log-probability a label": (lambda: F.nll_loss(LOGITS, LABELS, reduction="sum"), 5 * 8 + 5 * 4, 4 + 4),
    "a list": (lambda: torch._foreach_mul_([VECTOR, VECTOR.clone()], 2.0), 512, 512),
}


@pytest.mark.parametrize("what", TRAFFIC)
def test_bytes_read_and_written(what):
    run, read, written = TRAFFIC[what]
    found = record(run)[-1][1]
    assert (found.bytes_read, found.bytes_written) == (read, written)


def test_a_fused_optimizer_reads_and_writes_all_its_lists():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 16)).sum().backward()
    found = {str(f): c for f, c in record(optimizer.step)}["aten._fused_adamw_.default"]
    elements, steps = 16 * 16 + 16, 2
    assert found.bytes_written == 4 * elements * 4  # weights, both moments, and the gradients, which it may scale
    assert found.bytes_read == 4 * elements * 4 + 4 * steps
    assert (found.op_class, found.kernels) == (OpClass.ELEMENTWISE, 1)


def test_views_and_allocation_run_no_kernel():
    x = torch.ones(4, 6)
    for run in (lambda: x.view(24), x.t, lambda: x[1:], lambda: x.expand(2, 4, 6), x.detach,
                lambda: x.split(2), lambda: torch.empty(5), lambda: torch.empty_like(x), lambda: x.unsqueeze_(0),
                lambda: torch.zeros(0)):
        assert [c.kernels for _, c in record(run)] == [0]


# Classes

CLASSES = {
    OpClass.CONTRACTION: [lambda: torch.ones(2, 2) @ torch.ones(2, 2), RUNS["bmm"]],
    OpClass.NORMALIZATION: [
        lambda: TABLE.softmax(-1), lambda: TABLE.log_softmax(-1), lambda: F.layer_norm(TABLE, (6,)),
        TABLE.sum, lambda: TABLE.mean(-1), lambda: F.nll_loss(LOGITS, LABELS),
        lambda: torch.linalg.vector_norm(TABLE), lambda: torch._foreach_norm([TABLE]), lambda: TABLE.argmax(-1),
    ],
    OpClass.ELEMENTWISE: [
        lambda: TABLE + TABLE, lambda: F.gelu(TABLE), lambda: torch.where(TABLE > 0, TABLE, TABLE), TABLE.exp,
        lambda: TABLE.to(torch.bfloat16), lambda: torch.native_dropout(TABLE, 0.5, True),
        lambda: torch._foreach_sqrt([TABLE]),
    ],
    OpClass.MOVEMENT: [
        TABLE.clone, lambda: torch.cat((TABLE, TABLE)), lambda: F.embedding(ROWS, TABLE),
        lambda: TABLE.t().contiguous(), lambda: torch.zeros_like(TABLE), lambda: TABLE.clone().copy_(TABLE),
        lambda: TABLE.gather(0, ROWS), lambda: torch.rand(3), lambda: torch.tril(TABLE),
    ],
}


@pytest.mark.parametrize("op_class", CLASSES)
def test_classes(op_class):
    for run in CLASSES[op_class]:
        func, found = [(f, c) for f, c in record(run) if c.kernels][-1]
        assert found.op_class is op_class, str(func)


def test_a_copy_that_changes_the_format_is_a_cast():
    half = torch.empty(100, 6, dtype=torch.bfloat16)
    assert only(lambda: half.copy_(TABLE)).op_class is OpClass.ELEMENTWISE
    assert only(lambda: TABLE.to(torch.bfloat16)).dtype == "float32"


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "electra"])
def test_every_op_of_a_training_step_has_a_class(name):
    model = tiny_model(name)

    def run():
        ids = torch.randint(VOCAB, (2, 12))
        if name == "vit":
            logits = model(torch.randn(2, 3, 16, 16)).logits
        elif TASK_OF[name] == "seq2seq":
            logits = model(input_ids=ids, decoder_input_ids=ids).logits
        else:
            logits = model(ids).logits
        labels = torch.zeros(logits.flatten(0, -2).shape[0], dtype=torch.long)
        F.cross_entropy(logits.flatten(0, -2), labels, reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            torch.optim.AdamW(model.parameters(), **options).step()

    found = record(run)
    assert len(found) > 200
    assert {str(f) for f, c in found if c.kernels and c.op_class is OpClass.OTHER} == set()


def test_fake_tensors_cost_what_real_ones_do():
    from torch._subclasses import FakeTensorMode

    def run():
        model = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50))
        return record(lambda: F.cross_entropy(model(torch.zeros(4, 7, dtype=torch.long)).flatten(0, 1),
                                              torch.zeros(28, dtype=torch.long)).backward())

    real = run()
    with FakeTensorMode():
        fake = run()
    kept = [[(str(f), c) for f, c in found if c.kernels] for found in (real, fake)]
    assert kept[0] == kept[1]
    assert len(kept[0]) > 8


def test_rows_of_products_are_those_of_their_operands_and_result():
    a, b = torch.randn(6, 8), torch.randn(5, 8)
    found = cost(aten.mm.default, (a, b.t()), {}, a @ b.t())
    assert (found.leading, found.layout) == ((8, 8, 5), "")
    bias = torch.randn(5).expand(6, 5)  # read again for each row, and lies in none
    assert cost(aten.addmm.default, (bias, a, b.t()), {}, a @ b.t()).leading == (8, 8, 5)


def test_layouts_of_what_memory_binds():
    x, y = torch.randn(2, 3, 4), torch.randn(4)
    moved = x.transpose(0, 1)

    def layout(func, *args):
        return cost(func, args, {}, func(*args)).layout

    assert layout(aten.add.Tensor, x, x) == ""
    assert layout(aten.mul.Tensor, x, torch.tensor(2.0)) == ""
    assert layout(aten.add.Tensor, moved, moved) == ""  # in another order, but all in the same
    assert layout(aten.add.Tensor, x, y) == "strided"  # broadcast
    assert layout(aten.add.Tensor, moved, moved.contiguous()) == "strided"
    assert layout(aten.gelu.default, x[..., ::2]) == "strided"
    assert cost(aten._to_copy.default, (x,), {"dtype": torch.bfloat16}, x.bfloat16()).layout == "cast"


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_attention_that_drops_pairs_says_so(share):
    q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta")
    args = (q, q, q, share, True)
    func = aten._scaled_dot_product_flash_attention.default
    assert cost(func, args, {}, func(*args)).layout == ("dropout" if share else "")
