"""The offload settings and their bytes."""

from __future__ import annotations

import pytest

from tightfit.planning.offload import offload_advice

GIB = 1 << 30
BILLION = 10**9


@pytest.mark.parametrize(("device", "host", "stage", "total"), [
    (24, 256, "ZeRO-2 with the optimizer in host memory", "16 bytes x 1.5 for buffers = 156 GiB"),
    (12, 256, "ZeRO-3 with parameters and optimizer in host memory", "18 bytes x 1.5 for buffers = 176 GiB"),
    (24, 64, "ZeRO-3 with the optimizer on NVMe", "156 GiB; this machine has 64.0 GiB"),
])  # fmt: skip
def test_states_move_to_the_host_then_weights_too_then_to_nvme(device, host, stage, total):
    """The bytes are those of DeepSpeed's estimates for ZeRO-2 and ZeRO-3 with offload."""
    said = offload_advice(7 * BILLION, 2 * GIB, device * GIB, host * GIB)
    assert stage in said
    assert total in said
