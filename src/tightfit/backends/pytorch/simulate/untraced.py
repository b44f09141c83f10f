"""Memory that tracing cannot see, each piece with its size and where that comes from.

Outside the allocator lies the CUDA context with the kernels that were loaded; inside it the workspaces of cuBLAS, which
no tensor holds; in the host's memory the global batches that wait for the step, and a checkpoint on its way. A figure
measured on the GPU (`benchmarks/context_bytes.py`) takes the place of an assumed one. One device has no NCCL buffers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.backends import cuda_context
from tightfit.devices import MIB, Device, listed_device
from tightfit.recipe import Recipe
from tightfit.system import pinned_size
from tightfit.trace import Category, Op, OpClass, Phase, Trace, UntracedMemory

CONTEXT_RECORDS = Path(__file__).with_name("context_bytes.json")
"""Contexts that `benchmarks/context_bytes.py` measured, by the GPU's name."""

WORKSPACE, WIDE_WORKSPACE = 8_519_680, 32 * MIB
WIDE_MAJORS = (9, 10, 12)
"""Bytes of a cuBLAS workspace by default, and the compute capabilities (the major part) whose is the wide one: Hopper,
and since torch 2.12 Blackwell (pytorch pull request 175344)."""

LT_WORKSPACE = MIB
"""Bytes of a cuBLASLt workspace, as measured on an H100."""

BY_OTHERS = re.compile("attention|attn|conv|_grouped_mm|_scaled_mm")
"""Products that are not cuBLAS's, by their names."""

MAIN_THREAD = (Phase.FORWARD, Phase.EVALUATION, Phase.PREFILL, Phase.DECODE)
AUTOGRAD_THREAD = (Phase.BACKWARD, Phase.RECOMPUTE)
"""Phases that run in the main thread, and in the thread that autograd has for a CUDA device."""


def untraced(recipe: Recipe, device: Device, trace: Trace) -> list[UntracedMemory]:
    """Memory of the recipe's step on `device` that its trace does not hold; nothing on the CPU, whose memory is all
    the host's.

    recipe: resolved. trace: of the whole model.
    """
    if device.kind == "cpu":
        return []
    found = [*_context(recipe, device), *_workspaces(device, trace)]
    if recipe.mode == "train":
        found += _global_batches(recipe, trace)
    return found


def _context(recipe: Recipe, device: Device) -> Iterator[UntracedMemory]:
    record = _recorded_context(device.name)
    if record is None:
        yield from cuda_context.assumed(device)
        return
    yield UntracedMemory(
        name="CUDA context and kernels", where="context", bytes=record["compiled" if recipe.compiled else "step"],
        source=f"measured after a training step on {record['gpu']}, {record['date']}, torch {record['torch']}, "
               f"driver {record['driver']}",
    )


def _recorded_context(name: str) -> dict[str, Any] | None:
    """Bytes of context and kernels after a training `step` and after a `compiled` one on the GPU of that name, with
    `gpu`, `date`, `torch` and `driver`; None where it was not measured."""
    records = json.loads(CONTEXT_RECORDS.read_text("utf-8"))
    return next(({"gpu": gpu, **record} for gpu, record in records.items() if _card(gpu) == _card(name)), None)


def _card(name: str) -> str:
    """The catalogue's name of a GPU, however it was written."""
    bare = re.split(r" with | \(like ", name)[0]
    card = listed_device(bare)
    return bare if card is None else card.name


# cuBLAS


def _workspaces(device: Device, trace: Trace) -> Iterator[UntracedMemory]:
    """Workspaces of cuBLAS for each thread that multiplies matrices: one belongs to a handle and a stream, and threads
    have handles of their own (aten/src/ATen/cuda/CublasHandlePool.cpp). It is asked for behind the first product."""
    major, minor = device.capability or (0, 0)
    of_cublas = f"PyTorch's default for compute capability {major}.{minor}, kept from the first matrix product on"
    for where, phases in (("the main thread", MAIN_THREAD), ("autograd's thread", AUTOGRAD_THREAD)):
        products = [op for op in trace.ops if op.phase in phases and op.op_class is OpClass.CONTRACTION
                    and not BY_OTHERS.search(op.name)]
        biased = [op for op in products if "addmm" in op.name]
        if products:
            yield UntracedMemory(name=f"cuBLAS workspace of {where}", bytes=workspace_bytes(device), where="allocator",
                                 source=of_cublas, born=_behind(products[0], trace))
        if biased:
            yield UntracedMemory(name=f"cuBLASLt workspace of {where}", bytes=LT_WORKSPACE, where="allocator",
                                 source="PyTorch's default, kept from the first matrix product with a bias on",
                                 born=_behind(biased[0], trace))


def _behind(op: Op, trace: Trace) -> int:
    """The tick in which the op's result is made."""
    return next((a.born for a in trace.allocations if a.born > op.tick), op.tick)


def workspace_bytes(device: Device) -> int:
    """Bytes of a cuBLAS workspace on the device."""
    return WIDE_WORKSPACE if (device.capability or (0, 0))[0] in WIDE_MAJORS else WORKSPACE


# The host's memory


def _global_batches(recipe: Recipe, trace: Trace) -> Iterator[UntracedMemory]:
    """The global batches on their way to the device: each worker's, and the one in use."""
    loading, micro = recipe.loading, recipe.micro_batch_size
    first = trace.span("step 1")
    inputs = [a for a in trace.allocations if a.category is Category.OTHER and first.start <= a.born < first.stop]
    tensors = [a.bytes for a in inputs if a.bytes]
    if not tensors or micro == "auto" or loading.workers == "auto":
        return
    waiting = loading.workers * loading.prefetch + 1
    held = [pinned_size(size) for size in tensors] if loading.pin_memory else tensors
    global_batch = sum(held) * -(-recipe.batch_size // min(micro, recipe.batch_size))
    kind = "page-locked, each tensor rounded up to a power of two" if loading.pin_memory else "not page-locked"
    yield UntracedMemory(name="prefetched global batches", bytes=global_batch * waiting, where="host",
                 source=f"{waiting} global batches, {kind}; the data itself is not counted")
