"""Memory of a CUDA context and of the kernels loaded into it, outside any allocator, where it was not measured.

The driver sets a stack aside for every thread that can be resident at once; what it takes besides hardly differs from
card to card. Kernels are loaded when they are first used, by default since CUDA 12.2; PyTorch has asked for it since
1.13, and before that loaded all of them.

| constant | figure | where it comes from |
|---|---|---|
| `STACK` | 1 KiB a thread | CUDA's default (cudaLimitStackSize), for all resident threads at once as NVIDIA's forum has it; 216 MB on an A100 |
| `DRIVER` | 168 MiB, 45 more or less | the rest of published contexts: 319 MiB on a Titan V with CUDA 10 (pytorch issue 28394), 256 on an RTX 3090 with 12.8 (InvokeAI issue 9413), 426 on an RTX 6000 Ada with 13.0 (unsloth-zoo pull request 1053) |
| `KERNELS` | 164 MiB, half of it more or less | what a model's run on an H100 added outside PyTorch's allocator (vLLM pull request 12126); the range is assumed |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from tightfit.devices import MIB, Device
from tightfit.trace import UntracedMemory

ASSUMED = "assumed, not yet measured on this GPU"
STACK = 1024
DRIVER, DRIVER_UNCERTAINTY = 168 * MIB, 45 * MIB
KERNELS, KERNELS_UNCERTAINTY = 164 * MIB, 82 * MIB


def context(device: Device) -> UntracedMemory:
    """A bare context."""
    return UntracedMemory(
        name="CUDA context", bytes=DRIVER + STACK * device.resident_threads * device.units,
        uncertainty=DRIVER_UNCERTAINTY, where="context",
        source=f"{ASSUMED}: the driver's own, from published contexts of three cards, and 1 KiB of stack for each "
               "resident thread",
    )


def assumed(device: Device) -> list[UntracedMemory]:
    """A context, and kernels loaded on first use."""
    return [context(device), UntracedMemory(
        name="CUDA kernels", bytes=KERNELS, uncertainty=KERNELS_UNCERTAINTY, where="context",
        source=f"{ASSUMED}: loaded on first use; what a model on an H100 added, compiled kernels included",
    )]  # fmt: skip
