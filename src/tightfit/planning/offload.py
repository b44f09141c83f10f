"""Where nothing fits: which of DeepSpeed's ZeRO offload settings would hold the model, with its bytes.

Bytes a parameter of mixed-precision AdamW, and half as much again of host memory for buffers, as DeepSpeed's own
estimators count (Rajbhandari et al. 2020, ZeRO).
"""

from __future__ import annotations

from tightfit.text import size

WEIGHT = 2
"""Bytes a parameter of half-precision weights."""
STATES = 16
"""Bytes a parameter of fp32 gradients (4), master weights (4) and AdamW's two states (8)."""
HOST_BUFFERS = 1.5
"""Factor by which DeepSpeed's estimators multiply host memory, for buffers."""


def offload_advice(parameters: int, other_bytes: int, device_bytes: int, host_bytes: int) -> str:
    """A sentence: what ZeRO would move off a device, and where to.

    parameters: their number. other_bytes: what the device holds besides weights, gradients and states at the smallest
    micro-batch. device_bytes, host_bytes: what the device and the machine around it have.
    """
    each, moved = STATES, "the optimizer"
    if WEIGHT * parameters + other_bytes > device_bytes:
        each, moved = STATES + WEIGHT, "parameters and optimizer"
    kept = round(each * parameters * HOST_BUFFERS)
    if kept > host_bytes:
        stage = f"ZeRO-3 with {moved} on NVMe"
    else:
        stage = f"ZeRO-{2 if each == STATES else 3} with {moved} in host memory"
    return (f"DeepSpeed, which tightfit does not run yet, moves states off the device: {stage}, {parameters:,} "
            f"parameters x {each} bytes x {HOST_BUFFERS} for buffers = {size(kept)}; this machine has "
            f"{size(host_bytes)} of memory.")
