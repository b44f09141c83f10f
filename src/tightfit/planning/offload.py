"""Where nothing fits: which of DeepSpeed's ZeRO offload branches would hold the model, with its host and NVMe bytes.

The tree: fits, then move nothing; does not fit, then ZeRO-2 with the optimizer in host memory, or ZeRO-3 with the
parameters there too; more than the host holds, then ZeRO-3, which alone can use NVMe.

Bytes a parameter of mixed-precision AdamW (Rajbhandari et al. 2020, ZeRO; DeepSpeed's documentation of its memory
requirements, which counts the same):

    half-precision weights on the device                      2
    fp32 gradients, fp32 master weights, two fp32 states     16, in host memory (or NVMe)
    half-precision weights, kept beside them by ZeRO-3        2, in host memory (or NVMe)

DeepSpeed's own estimators multiply host memory by 1.5 for buffers; so do these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tightfit.text import size

Branch = Literal["none", "cpu", "nvme"]

WEIGHT = 2
"""Bytes a parameter of half-precision weights."""
STATES = 16
"""Bytes a parameter of gradients (4), master weights (4) and AdamW's two states (8)."""
HOST_BUFFERS = 1.5
"""What DeepSpeed's estimators multiply host memory by, for buffers."""
MARGIN = 0.03
"""Share of the device's memory that stays free."""


@dataclass(frozen=True, kw_only=True)
class OffloadAdvice:
    """The branch of the tree: nothing is moved, states move to host memory, or states move to NVMe.

    parameters_too: whether the weights move as well (ZeRO-3), and only those of one block at a time are on the device.
    device_bytes, host_bytes, nvme_bytes: what each then holds.
    sentences: the branch, and the arithmetic behind the bytes.
    """

    branch: Branch
    parameters_too: bool = False
    device_bytes: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    sentences: tuple[str, ...] = ()


def offload_branch(
    *, fits: bool, parameters: int, largest_block: int, other_bytes: int, device_bytes: int, host_bytes: int
) -> OffloadAdvice:
    """The branch for a model on a device.

    parameters: their number. largest_block: that of the block with the most.
    other_bytes: what the device holds besides weights, gradients and states at the smallest micro-batch: activations,
        temporary memory and the context.
    device_bytes, host_bytes: what the device and the machine around it have.
    """
    if fits:
        return OffloadAdvice(branch="none", sentences=("It fits: offloading would only make it slower.",))
    room = round(device_bytes * (1 - MARGIN))
    weights, states = WEIGHT * parameters, STATES * parameters
    parameters_too = weights + other_bytes > room
    on_device = (2 * WEIGHT * largest_block if parameters_too else weights) + other_bytes
    kept = states + (weights if parameters_too else 0)
    stage = "ZeRO-3 with parameters and optimizer" if parameters_too else "ZeRO-2 with the optimizer"
    each = STATES + (WEIGHT if parameters_too else 0)
    arithmetic = (
        f"{parameters:,} parameters x {each} bytes (fp32 gradients 4, master weights 4, AdamW's states 8"
        f"{', half-precision weights 2' if parameters_too else ''}) = {size(kept)}"
    )
    device = f"The device, which has {size(device_bytes)}, would hold {size(on_device)}: " + (
        "one block's weights and gradients at a time" if parameters_too else f"half-precision weights {size(weights)}"
    ) + f", and {size(other_bytes)} of activations, temporary memory and context."
    warning = () if on_device <= room else (
        f"Even so the device misses {size(on_device - room)}: shorten seq_len or take a larger GPU.",
    )
    in_host = round(kept * HOST_BUFFERS)
    if in_host <= host_bytes:
        sentence = (f"DeepSpeed, which tightfit does not run yet, moves states off the device: {stage} in host memory, "
                    f"{arithmetic}, x {HOST_BUFFERS} for buffers = {size(in_host)} of the {size(host_bytes)} here.")
        return OffloadAdvice(branch="cpu", parameters_too=parameters_too, device_bytes=on_device, host_bytes=in_host,
                             sentences=(sentence, device, *warning))
    buffers = round((weights if parameters_too else 0) * (HOST_BUFFERS - 1)) + 2 * STATES * largest_block
    moved = "parameters and optimizer" if parameters_too else "the optimizer"
    sentence = (f"DeepSpeed, which tightfit does not run yet, moves states off the device: ZeRO-3 with {moved} on "
                f"NVMe, {arithmetic}; in host memory, with buffers, it would be {size(in_host)} of the "
                f"{size(host_bytes)} here, and about {size(buffers)} of buffers stay in it.")
    return OffloadAdvice(branch="nvme", parameters_too=parameters_too, device_bytes=on_device, host_bytes=buffers,
                         nvme_bytes=kept, sentences=(sentence, device, *warning))
