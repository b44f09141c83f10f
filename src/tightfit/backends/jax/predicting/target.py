"""A GPU as XLA wants it described, so that it can compile for one that is not there.

XLA's own description files (openxla/xla, xla/backends/gpu/target_config/specs) are the guide to the fields. What a
generation has in common is here, from the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; the rest is the device's own. The memory size matters most: XLA recomputes on its own what would not fit.
"""

from __future__ import annotations

from typing import NamedTuple

from tightfit.devices import Device
from tightfit.errors import Refused

KIB = 1024
DNN = (9, 10, 0)
"""The cuDNN that XLA compiles for: the one that XLA's own descriptions of newer cards have."""


class Generation(NamedTuple):
    """One streaming multiprocessor. shared_kib: its shared memory, of which a block may have `block_kib`.
    threads: resident at once. lanes: fp32 units."""

    shared_kib: int
    block_kib: int
    threads: int
    lanes: int


GENERATIONS = {
    (7, 0): Generation(96, 96, 2048, 64), (7, 5): Generation(64, 64, 1024, 64),
    (8, 0): Generation(164, 163, 2048, 64), (8, 6): Generation(100, 99, 1536, 128),
    (8, 9): Generation(100, 99, 1536, 128), (9, 0): Generation(228, 227, 2048, 128),
    (10, 0): Generation(228, 227, 2048, 128), (12, 0): Generation(100, 99, 1536, 128),
}  # fmt: skip
ACCELERATED = {(9, 0), (10, 0)}
"""Capabilities for which XLA compiles with the features that no later generation keeps, such as sm_90a."""


def target_description(device: Device) -> str:
    """The device as text of XLA's GpuTargetConfigProto. Raises Refused for one whose figures are not known."""
    own = GENERATIONS.get(device.capability or (0, 0))
    fp32 = device.flops.get("fp32", 0.0)
    if own is None or not (device.units and device.bandwidth and device.l2_bytes and fp32):
        raise Refused(f"gpu: XLA cannot compile for {device.name}, whose figures are not known; write --gpu with one "
                      "that tightfit gpus lists, or backend=pytorch")
    major, minor = device.capability or (0, 0)
    clock = fp32 / (2 * own.lanes * device.units) / 1e9  # a lane multiplies and adds in a cycle
    extension = "ACCELERATED_FEATURES" if (major, minor) in ACCELERATED else "NONE"
    dnn = ".".join(map(str, DNN))
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": own.shared_kib * KIB,
        "shared_memory_per_block_optin": own.block_kib * KIB,
        "threads_per_core_limit": own.threads,
        "core_count": device.units,
        "fpus_per_core": own.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 64 * KIB,
        "registers_per_block_limit": 64 * KIB,
        "memory_bandwidth": round(device.bandwidth),
        "device_memory_size": device.memory_bytes,
        "l2_cache_size": device.l2_bytes,
        "clock_rate_ghz": f"{clock:.3f}",
        "dnn_version": f'"{dnn}"',
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    return "\n".join([
        "gpu_device_info {", *lines,
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}", "}",
        'platform_name: "CUDA"',
        "dnn_version_info {{ major: {} minor: {} patch: {} }}".format(*DNN),
        f'device_description_str: "{device.name}"', "",
    ])  # fmt: skip
