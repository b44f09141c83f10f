"""Devices that are not here, for the tests of what is chosen for them."""

from __future__ import annotations

import torch

from tightfit.devices import Device

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gpu(major: int, minor: int = 0) -> Device:
    """A CUDA device of that compute capability."""
    return Device(kind="cuda", name=f"sm_{major}{minor}", memory_bytes=1 << 34, capability=(major, minor))


A100, H100, V100, T4, ADA = gpu(8), gpu(9), gpu(7), gpu(7, 5), gpu(8, 9)
CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
