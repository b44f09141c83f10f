"""Memory of a CUDA context and of the kernels loaded into it, outside any allocator, where it was not measured.

The driver sets a stack aside for every thread that can be resident at once; what it takes besides hardly differs from
card to card. Kernels are loaded when they are first used, by default since CUDA 12.2; PyTorch has asked for it since
1.13, and before that loaded all of them.

| constant | figure | where it comes from |
|---|---|---|
| `STACK` | 1 KiB a thread | CUDA's default (cudaLimitStackSize), for all resident threads at once as NVIDIA's forum has it; 216 MB on an A100 |
| `DRIVER` | 198 MiB, 66 more or less | the rest of contexts: 527 MiB measured on an H100 with CUDA 13.0 (results/context_bytes-h100-80gb-hbm3.json); published 426 on an RTX 6000 Ada with 13.0 (unsloth-zoo pull request 1053), 319 on a Titan V with 10 (pytorch issue 28394), 256 on an RTX 3090 with 12.8 (InvokeAI issue 9413) |
| `KERNELS` | 210 MiB, 85 more or less | what training steps on that H100 added outside PyTorch's allocator, 252 MiB, and a model's run on another, 164 (vLLM pull request 12126) |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from tightfit.devices import MIB, Device
from tightfit.trace import UntracedMemory

ASSUMED = "assumed, not yet measured on this GPU"
STACK = 1024
DRIVER, DRIVER_UNCERTAINTY = 198 * MIB, 66 * MIB
KERNELS, KERNELS_UNCERTAINTY = 210 * MIB, 85 * MIB


def context(device: Device) -> UntracedMemory:
    """A bare context."""
    return UntracedMemory(
        name="CUDA context", bytes=DRIVER + STACK * device.resident_threads * device.units,
        uncertainty=DRIVER_UNCERTAINTY, where="context",
        source=f"{ASSUMED}: the driver's own, from contexts of four cards, and 1 KiB of stack for each "
               "resident thread",
    )


def assumed(device: Device) -> list[UntracedMemory]:
    """A context, and kernels loaded on first use."""
    return [context(device), UntracedMemory(
        name="CUDA kernels", bytes=KERNELS, uncertainty=KERNELS_UNCERTAINTY, where="context",
        source=f"{ASSUMED}: loaded on first use; as on an H100, compiled kernels included",
    )]  # fmt: skip
