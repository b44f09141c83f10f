"""What ops keep for the backward pass, and what they allocate: measured on a GPU, beside what is planned for it.

Every case runs twice, on the GPU and on fake tensors that stand for it, in the same way. Recorded for each: the
kernels that autograd names, the saved tensors, and the bytes asked of the allocator after and at the peak of the
forward pass and of the backward pass (requested, not rounded), counted from the inputs on.

Run: python benchmarks/cuda_op_tables.py   (needs a CUDA device; minutes. Written to results/cuda_op_tables.json)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.cuda.scratch import scratch
from tightfit.backends.pytorch.simulate.target import PlanningMode, simulate
from tightfit.backends.pytorch.techniques.attention.kernels import varlen
from tightfit.devices import Device
from tightfit.trace import live_bytes

Run = Callable[..., Any]
Make = Callable[[torch.device], list[Any]]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """make: the inputs, on a device. run: the op, whose result is kept, and given a gradient. autocast: its format."""

    name: str
    make: Make
    run: Run
    autocast: torch.dtype | None = None
    kernel: SDPBackend | None = None


@dataclass
class Outcome:
    """nodes: autograd's names. saved: shape and format of each saved tensor. Bytes are counted from the inputs on."""

    nodes: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    forward_bytes: int = 0
    forward_peak: int = 0
    backward_bytes: int = 0
    backward_peak: int = 0
    error: str = ""


class GpuMeter:
    """Bytes requested of torch's CUDA allocator."""

    def now(self) -> int:
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


class FakeMeter:
    """Bytes of the fake tensors that a tracker has seen."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.start = tracker, 0

    def now(self) -> int:
        return sum(a.bytes for a in self.tracker.allocations if a.died is None)

    def restart(self) -> None:
        self.start = self.tracker.memory.tick

    def peak(self) -> int:
        ticks, live = live_bytes(self.tracker.allocations)
        first = max(int((ticks <= self.start).sum()) - 1, 0)
        return int(live[first:].max()) if len(live) else 0


def observe(case: Case, device: torch.device, meter: GpuMeter | FakeMeter) -> Outcome:
    """Run a case and say what it did."""
    inputs = case.make(device)
    before = meter.now()
    outcome = Outcome()

    def note(tensor: Tensor) -> Tensor:
        outcome.saved.append(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    casts = nullcontext() if case.autocast is None else torch.autocast(device.type, dtype=case.autocast)
    allowed: AbstractContextManager[Any] = nullcontext() if case.kernel is None else sdpa_kernel(case.kernel)
    meter.restart()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), casts, allowed:
        output = case.run(*inputs)
    outcome.saved.sort()
    outcome.forward_bytes, outcome.forward_peak = meter.now() - before, meter.peak() - before
    if isinstance(output, Tensor) and output.grad_fn is not None:
        outcome.nodes = sorted(set(_nodes(output.grad_fn)))
        gradient = torch.ones_like(output)
        meter.restart()
        output.backward(gradient)
        del gradient, output
        outcome.backward_bytes, outcome.backward_peak = meter.now() - before, meter.peak() - before
    return outcome


def _nodes(node: Any) -> Iterator[str]:
    if node is not None:
        yield type(node).__name__
        for following, _ in node.next_functions:
            yield from _nodes(following)


def predicted(case: Case, device: Device) -> Outcome:
    """The case on fake tensors that stand for `device`."""
    tracker = Tracker(scratch=scratch)
    with simulate(device), PlanningMode(device), tracker:
        return _guarded(case, torch.device("cpu"), FakeMeter(tracker))


def measured(case: Case) -> Outcome:
    """The case on the GPU, once before for what a first call alone allocates."""
    device, meter = torch.device("cuda"), GpuMeter()
    _guarded(case, device, meter)
    return _guarded(case, device, meter)


def _guarded(case: Case, device: torch.device, meter: GpuMeter | FakeMeter) -> Outcome:
    try:
        return observe(case, device, meter)
    except Exception as error:  # a kernel that cannot serve is an outcome too
        return Outcome(error=type(error).__name__)


def differences(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.01) -> list[str]:
    """In what a prediction misses a measurement, as sentences; bytes by more than `tolerance` and 64 KiB."""
    misses = [
        f"{part}: {found[part]} instead of {expected[part]}"
        for part in ("nodes", "saved") if sorted(found[part]) != sorted(expected[part])
    ]
    if bool(found["error"]) != bool(expected["error"]):
        misses.append(f"error: {found['error'] or 'none'} instead of {expected['error'] or 'none'}")
    for part in ("forward_bytes", "forward_peak", "backward_bytes", "backward_peak"):
        gap = abs(found[part] - expected[part])
        if gap > max(tolerance * expected[part], 1 << 16):
            misses.append(f"{part}: {found[part]:,} instead of {expected[part]:,}")
    return misses


# The table.


def _tensors(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> Make:
    def make(device: torch.device) -> list[Any]:
        return [torch.randn(*shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]

    return make


def _heads(dtype: torch.dtype, length: int, size: int, heads: int, mask: str, device: torch.device) -> list[Any]:
    """Query, key and value as views of one projection, which is how models make them, and a mask of that kind."""
    whole = torch.randn(2, length, 16 + 2 * heads, size, dtype=dtype, device=device, requires_grad=True)
    masks: dict[str, Callable[[], Tensor]] = {
        "keys": lambda: torch.ones(2, 1, 1, length, dtype=torch.bool, device=device),
        "pairs": lambda: torch.ones(2, 1, length, length, dtype=torch.bool, device=device),
        "added": lambda: torch.zeros(2, 1, length, length, dtype=dtype, device=device),
    }
    return [whole, heads, masks[mask]() if mask in masks else None]


def _attend(whole: Tensor, heads: int, mask: Tensor | None, dropout: float, causal: bool) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in whole.split((16, heads, heads), dim=2))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=heads != 16
    )


def _attention_cases() -> Iterator[Case]:
    variants = [
        (512, 64, 16, "none", 0.0), (512, 64, 16, "causal", 0.0), (500, 64, 16, "causal", 0.0),
        (512, 64, 16, "causal", 0.1), (512, 64, 16, "causal", 0.125), (512, 128, 16, "causal", 0.0),
        (512, 80, 16, "causal", 0.0), (512, 256, 16, "causal", 0.0), (512, 60, 16, "causal", 0.0),
        (512, 64, 4, "causal", 0.0), (512, 64, 16, "keys", 0.0), (512, 64, 16, "pairs", 0.0),
        (500, 64, 16, "pairs", 0.0), (512, 64, 16, "added", 0.1), (512, 64, 4, "pairs", 0.0),
    ]  # fmt: skip
    kernels = {"auto": None, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
               "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    for length, size, heads, mask, dropout in variants:
        for dtype in (FP32, BF16) if dropout else (FP32, FP16, BF16):
            for kernel, backend in kernels.items():
                name = f"sdpa {kernel} {_short(dtype)} T={length} D={size} key heads={heads} mask={mask} p={dropout}"
                make = partial(_heads, dtype, length, size, heads, mask)
                yield Case(name, make, partial(_attend, dropout=dropout, causal=mask == "causal"), kernel=backend)


def _packed(dtype: torch.dtype, heads: int, device: torch.device) -> list[Any]:
    starts = torch.tensor([0, 100, 512, 700, 1024], dtype=torch.int32, device=device)
    return [*_heads(dtype, 512, 64, heads, "none", device)[:2], starts]


def _attend_packed(whole: Tensor, heads: int, starts: Tensor) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in whole.split((16, heads, heads), dim=2))
    return varlen(query, key, value, starts, True, None, 0.0, None)


def _ids(count: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    weight = torch.randn(rows, size, dtype=dtype, device=device, requires_grad=True)
    return [torch.randint(rows, (count,), device=device), weight]


def _logits(dtype: torch.dtype, device: torch.device) -> list[Any]:
    logits = torch.randn(1024, 32000, dtype=dtype, device=device, requires_grad=True)
    return [logits, torch.randint(32000, (1024,), device=device)]


def _op_cases() -> Iterator[Case]:
    wide, vector, square = (4, 512, 1024), (1024,), (1024, 1024)
    for dtype, cast in ((FP32, None), (BF16, None), (FP32, BF16), (FP32, FP16)):
        where = f"{_short(dtype)}{'' if cast is None else f' autocast {_short(cast)}'}"
        one, weights = _tensors(wide, dtype=dtype), _tensors(wide, vector, vector, dtype=dtype)
        yield Case(f"dropout {where}", one, lambda x: F.dropout(x, 0.1), cast)
        yield Case(f"layer_norm {where}", weights, lambda x, w, b: F.layer_norm(x, (1024,), w, b), cast)
        yield Case(f"rms_norm {where}", weights, lambda x, w, b: F.rms_norm(x, (1024,), w), cast)
        yield Case(f"linear {where}", _tensors(wide, square, vector, dtype=dtype), F.linear, cast)
        yield Case(f"linear without bias {where}", _tensors(wide, square, dtype=dtype), F.linear, cast)
        yield Case(f"two linears, one weight {where}", _tensors(wide, square, dtype=dtype), _twice, cast)
        yield Case(f"softmax {where}", one, lambda x: x.softmax(-1), cast)
        yield Case(f"gelu {where}", one, lambda x: F.gelu(x, approximate="tanh"), cast)
        yield Case(f"silu times {where}", _tensors(wide, wide, dtype=dtype), lambda x, y: F.silu(x) * y, cast)
        yield Case(f"cross_entropy {where}", partial(_logits, dtype), F.cross_entropy, cast)
        for count in (1000, 8192):
            yield Case(f"embedding of {count} {where}", partial(_ids, count, 32000, 1024, dtype), F.embedding, cast)
    for dtype in (FP16, BF16):
        one = _tensors((8, 16, 256, 256), dtype=dtype)
        yield Case(f"softmax to fp32 {_short(dtype)}", one, lambda x: x.softmax(-1, dtype=FP32))
        for heads in (16, 4):
            yield Case(f"varlen {_short(dtype)} key heads={heads}", partial(_packed, dtype, heads), _attend_packed)


def _scratch_cases() -> Iterator[Case]:
    """Kernels that take memory while they run."""
    for dtype in (FP32, BF16):
        where = _short(dtype)
        for shape in ((8192, 3072), (8192, 766), (512, 1024), (1 << 16, 64)):
            yield Case(f"sum of rows {shape} {where}", _tensors(shape, dtype=dtype), lambda x: x.sum(0))
        yield Case(f"sum of long rows {where}", _tensors((4, 1 << 20), dtype=dtype), lambda x: x.sum(1))
        many = _tensors((66_000, 256), (256,), (256,), dtype=dtype)
        yield Case(f"layer_norm of many rows {where}", many, lambda x, w, b: F.layer_norm(x, (256,), w, b))
        yield Case(f"embedding of two rows {where}", partial(_ids, 8192, 2, 1024, dtype), F.embedding)
        yield Case(f"rows by index {where}", partial(_ids, 8192, 32000, 1024, dtype), lambda ids, weight: weight[ids])
        yield Case(f"logsumexp {where}", _tensors((1024, 32000), dtype=dtype), lambda x: x.logsumexp(-1))
        yield Case(f"sort {where}", _tensors((5000,), dtype=dtype), lambda x: x.sort().values)


def _twice(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.linear(x, weight), weight)


def _with_gradients(device: torch.device) -> list[Any]:
    with device:
        model = nn.Sequential(nn.Embedding(8000, 512), nn.Linear(512, 2048), nn.Linear(2048, 512), nn.LayerNorm(512))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return [parameters]


def _step(make: Callable[..., torch.optim.Optimizer], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    optimizer.step()
    return optimizer


def _clip(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def _update_cases() -> Iterator[Case]:
    yield Case("clip_grad_norm_", _with_gradients, _clip)
    ways: dict[str, dict[str, Any]] = {
        "fused": {"fused": True}, "foreach": {"foreach": True, "fused": False},
        "loop": {"foreach": False, "fused": False},
    }
    for name, options in ways.items():
        yield Case(f"AdamW {name}", _with_gradients, partial(_step, partial(torch.optim.AdamW, lr=1e-3, **options)))
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True)
    yield Case("SGD foreach", _with_gradients, partial(_step, sgd))


def _short(dtype: torch.dtype) -> str:
    return {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[dtype]


def cases() -> list[Case]:
    """Every case, in order; names are unique."""
    return [*_attention_cases(), *_op_cases(), *_scratch_cases(), *_update_cases()]


def main() -> int:
    if not torch.cuda.is_available():
        print("cuda_op_tables: torch finds no CUDA device here, and this table is measured on one; "
              "run it on a machine with a GPU", file=sys.stderr)
        return 2
    import record

    warnings.simplefilter("ignore")  # torch says at length why a kernel that is forced cannot serve
    properties = torch.cuda.get_device_properties(0)
    device = Device(kind="cuda", name=properties.name, memory_bytes=properties.total_memory,
                    capability=(properties.major, properties.minor), units=properties.multi_processor_count)
    table, missed = {}, 0
    for case in cases():
        found, expected = asdict(predicted(case, device)), asdict(measured(case))
        misses = differences(found, expected)
        missed += bool(misses)
        table[case.name] = {"measured": expected, "predicted": found, "differences": misses}
        for miss in misses:
            print(f"{case.name}: {miss}")
    print(f"{len(table) - missed} of {len(table)} cases as predicted")
    facts = {"name": device.name, "memory_bytes": device.memory_bytes, "capability": device.capability,
             "cudnn": torch.backends.cudnn.version()}
    print(record.write("cuda_op_tables", {"gpu": facts, "cases": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
