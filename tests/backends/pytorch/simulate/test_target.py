"""Fake tensors that stand for a CUDA device take that device's choices; everything else takes its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.architectures import tiny_model
from tests.backends.pytorch.simulate.target_cases import A100, BF16, CPU, FP16, FP32, H100, T4
from tests.backends.pytorch.techniques.attention.attention_cases import batch_of, built
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.cuda.scratch import scratch
from tightfit.backends.pytorch.simulate.data_dependent import answer
from tightfit.backends.pytorch.simulate.target import PlanningMode, simulate
from tightfit.backends.pytorch.simulated_device import capability_of, simulated_device
from tightfit.backends.pytorch.techniques.attention import functions, kernels
from tightfit.backends.pytorch.techniques.loss.of_logits import cross_entropy_sum
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.devices import Device
from tightfit.errors import ModelError
from tightfit.models import TransformerConfig
from tightfit.techniques.attention import Eager, Flex, Sdpa
from tightfit.trace import Category, Phase

ROOT = Path(__file__).parents[4]


def on_real_tensors() -> list:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, 8, requires_grad=True)
    seen = []
    with torch.autocast("cpu", dtype=BF16):
        y = F.scaled_dot_product_attention(x, x, x)
        for z in (y, F.layer_norm(y, (8,)), y.softmax(-1), F.dropout(y, 0.5), F.rms_norm(y, (8,)),
                  F.cross_entropy(y.flatten(0, 2), torch.zeros(128, dtype=torch.long)), y.exp(), y.sum()):
            seen += [z.dtype, type(z.grad_fn).__name__, z.detach().double().sum().item()]
    y.float().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([x], 1.0)
    return [*seen, x.grad.sum().item(), norm.item()]


def registrations() -> dict[str, set[str]]:
    keys = ("AutocastCPU", "AutogradCPU")
    return {key: set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys}


def test_real_tensors_are_treated_as_ever_inside_and_after():
    expected, before = on_real_tensors(), registrations()
    types = list(torch.utils._foreach_utils._foreach_supported_types)
    with simulate(A100), simulate(H100):
        assert registrations() != before
        assert on_real_tensors() == expected
        with FakeTensorMode():
            assert F.dropout(torch.empty(4, requires_grad=True), 0.5).grad_fn.name() == "MulBackward0"
    with pytest.raises(ZeroDivisionError), simulate(A100):
        1 / 0  # noqa: B018
    assert registrations() == before
    assert on_real_tensors() == expected
    assert torch.utils._foreach_utils._foreach_supported_types == types


def test_the_cpu_as_target_changes_no_choice_of_torchs():
    before = registrations()
    with simulate(CPU), PlanningMode(CPU):
        assert registrations() == before
        x = torch.empty(2, 4, 16, 8, dtype=BF16, requires_grad=True)
        assert "ForCpu" in F.scaled_dot_product_attention(x, x, x).grad_fn.name()
        assert simulated_device(x) is CPU
        assert capability_of(x) is None
    assert simulated_device(torch.empty(1)) is None


def test_inside_a_cuda_target_the_cpus_fakes_stay_the_cpus():
    with simulate(A100), PlanningMode(CPU):
        x = torch.empty(2, 4, 16, 8, dtype=BF16, requires_grad=True)
        assert "ForCpu" in F.scaled_dot_product_attention(x, x, x).grad_fn.name()


# Models, steps and recomputation.


def trace_of(name: str, technique, kind: str, device: Device, dtype: torch.dtype = BF16, **changes) -> Tracker:
    """A tiny model's forward and backward pass on fakes for `device`, under autocast."""
    real = batch_of(kind, "causal-lm")
    with simulate(device), PlanningMode(device):
        build = built(tiny_model(name, **changes), technique)
        batch = real.map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))
        with Tracker(scratch=scratch) as tracker:
            tracker.phase = Phase.FORWARD
            with torch.autocast("cpu", dtype=dtype):
                loss = cross_entropy_sum(build.logits(batch), batch.labels)
            tracker.phase = Phase.BACKWARD
            loss.backward()
    assert all(parameter.grad is not None for parameter in build.model.parameters() if parameter.requires_grad)
    return tracker


def count(tracker: Tracker, name: str) -> int:
    return sum(op.name == f"{name}.default" for op in tracker.ops)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("device", "kind", "kernel"),
    [
        (A100, "none", "aten._scaled_dot_product_flash_attention"),
        (H100, "none", "aten._scaled_dot_product_cudnn_attention"),
        (T4, "none", "aten._scaled_dot_product_efficient_attention"),
        (A100, "packed", "torch_attn._varlen_attn"),
        (T4, "packed", "aten._scaled_dot_product_efficient_attention"),
    ],
)
def test_models_attend_with_the_targets_kernel(name, device, kind, kernel):
    tracker = trace_of(name, Sdpa(), kind, device, FP16)
    assert count(tracker, kernel) == count(tracker, f"{kernel}_backward") == 2
    dense = [op for op in tracker.ops if "softmax" in op.name and op.shapes[0][-1] == 24]
    assert not dense


@pytest.mark.parametrize(("device", "sums", "random"), [(A100, 40, 24), (H100, 40, 16), (T4, 64, 16)])
def test_a_block_keeps_what_can_be_counted_by_hand(device, sums, random):
    """Bytes kept for the backward pass by a layer of the bundled transformer, under autocast to fp16 with dropout."""
    hidden, heads, rows, length = 64, 8, 3, 40
    tokens = rows * length

    def kept(layers: int) -> int:
        shape = TransformerConfig(vocab_size=32, hidden_size=hidden, num_layers=layers, head_dim=8, num_heads=heads,
                                  max_seq_len=length, num_outputs=32)
        with simulate(device), PlanningMode(device), Tracker() as tracker:
            model = Transformer(shape)
            for parameter in model.parameters():
                tracker.mark(parameter, Category.WEIGHTS)
            tracker.phase = Phase.FORWARD
            with torch.autocast("cpu", dtype=FP16):
                loss = model(torch.zeros(rows, length, dtype=torch.long)).logits.sum()
            tracker.phase = Phase.BACKWARD
            loss.backward()
        return sum(a.bytes for a in tracker.trace("predicted").allocations if a.category is Category.ACTIVATIONS)

    # In half precision, in hidden units: what four products read (1 + 4 + 1 + 1), what GELU reads (4), query, key and
    # value (3). In fp32: the residual before each of two norms. A byte: two dropouts.
    units = 2 * (1 + 4 + 1 + 1 + 4 + 3) + 4 * 2 + 1 * 2
    statistics = 2 * 2 * 4 * tokens
    logsumexp = 4 * rows * heads * sums
    assert kept(4) - kept(3) == units * hidden * tokens + statistics + logsumexp + random


def test_packed_documents_choose_as_on_the_target():
    def way(device: Device, dtype: torch.dtype, dropout: float = 0.0, documents: int = 5) -> str:
        with simulate(device), PlanningMode(device):
            x = torch.empty(2, 4, 16, 8, dtype=dtype)
            return kernels.packed_way(x, x, torch.empty(documents + 1, dtype=torch.int32), dropout, None)

    assert way(A100, FP16) == way(H100, BF16) == "varlen"
    assert way(A100, FP32) == way(T4, FP16) == way(A100, FP16, 0.1) == "dense"
    assert way(CPU, FP32) == "slices"
    assert way(CPU, FP32, documents=2) == way(A100, FP32, documents=2) == "rows"
    assert way(CPU, FP32, 0.1) == "rows", "the fullest global batch a run can meet"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert way(A100, FP16) == "dense"


def test_a_mask_is_refused_where_only_flash_may_run():
    with simulate(A100), PlanningMode(A100), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        x = torch.empty(2, 4, 16, 8, dtype=BF16)
        with pytest.raises(ModelError, match="'flash' takes no mask"):
            kernels.sdpa(x, x, x, torch.ones(2, 1, 1, 16, dtype=torch.bool), False, 0.0, None)


@pytest.mark.parametrize("kind", ["none", "packed"])
def test_flex_attention_keeps_no_scores(kind):
    tracker = trace_of("llama", Flex(), kind, A100, num_attention_heads=2, num_key_value_heads=1)
    length = batch_of(kind, "causal-lm").labels.shape[1]
    assert not any(a.shape[-2:] == (length, length) for a in tracker.allocations)
    eager = trace_of("llama", Eager(), kind, A100)
    assert any(a.shape[-2:] == (length, length) for a in eager.allocations)


def test_flex_refuses_heads_that_no_kernel_is_compiled_for():
    with pytest.raises(ModelError, match="heads of at least 16 features on a GPU, and this model's have 8"):
        trace_of("llama", Flex(), "none", A100)


def test_flex_masks_have_the_size_of_the_real_ones():
    def shapes(mask) -> list:
        return [None if t is None else (tuple(t.shape), t.dtype) for t in mask.as_tuple(flatten=False)[2:-2]]

    real = functions.near_blocks(300, True, None, torch.device("cpu"))
    with simulate(A100), PlanningMode(A100):
        fake = functions.near_blocks(300, True, None, torch.device("cpu"))
    assert shapes(fake) == shapes(real)


def test_recomputation_sees_what_the_forward_pass_saw():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x):
            q = self.inner(self.norm(x)).view(2, 16, 4, 8).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)
            return x + F.dropout(y.transpose(1, 2).flatten(2), 0.1)

    for device in (A100, H100, T4):
        with simulate(device), PlanningMode(device):
            blocks = [Block() for _ in range(2)]
            x = torch.empty(2, 16, 32, requires_grad=True)
            with Tracker() as tracker:
                tracker.phase = Phase.FORWARD
                with torch.autocast("cpu", dtype=FP16):
                    for block in blocks:
                        x = checkpoint(block, x, use_reentrant=False)
                tracker.phase = Phase.BACKWARD
                x.sum().backward()
        first = [op.name for op in tracker.ops if op.phase is Phase.FORWARD]
        again = [op.name for op in tracker.ops if op.phase is Phase.RECOMPUTE]
        kernels_of = [name for name in first if "attention" in name or "dropout" in name]
        assert len(kernels_of) == 4
        assert [name for name in again if "attention" in name or "dropout" in name] == kernels_of


def test_scaled_losses_accumulate_and_step():
    with simulate(T4), PlanningMode(T4):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu")
        with Tracker(answer=answer) as tracker:
            for _ in range(2):
                for _ in range(3):
                    with torch.autocast("cpu", dtype=FP16):
                        logits = model(torch.empty(5, 8))
                    scaler.scale(cross_entropy_sum(logits, torch.zeros(5, dtype=torch.long))).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
    assert sum(op.name.startswith("aten._fused_adamw_") for op in tracker.ops) == 2
    assert count(tracker, "aten.native_dropout") == 6
