"""Devices, ops and a calibration made up for the tests of the time model."""

from __future__ import annotations

from tightfit.calibration import Calibration, Curve, Grid
from tightfit.devices import Device
from tightfit.trace import Op, OpClass, Phase

GPU = Device(kind="cuda", name="card", memory_bytes=1 << 34, capability=(8, 0), bandwidth=1e12, units=100,
             flops={"fp32": 1e13, "tf32": 1e14, "fp16": 2e14, "bf16": 2e14}, pcie_bandwidth=1e10)
CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34, units=1)


def gpu(memory, name="toy", capability=(8, 0)):
    return Device(kind="cuda", name=name, memory_bytes=int(memory), capability=capability)


def add(size=1000, phase=Phase.FORWARD, **fields):
    """An element-wise op that moves `size` bytes."""
    given = {"name": "aten.add.Tensor", "op_class": OpClass.ELEMENTWISE, "bytes_read": size, "dtype": "float32"}
    return Op(tick=0, phase=phase, **{**given, **fields})


def mm(m, n, k, dtype="bfloat16", phase=Phase.FORWARD, batch=1):
    stack = (batch,) if batch > 1 else ()
    item = 4 if dtype == "float32" else 2
    return Op(
        name="aten.bmm.default" if batch > 1 else "aten.mm.default", tick=0, phase=phase, dtype=dtype,
        op_class=OpClass.CONTRACTION, shapes=((*stack, m, k), (*stack, k, n)), flops=2 * batch * m * n * k,
        bytes_read=batch * item * (m * k + k * n), bytes_written=batch * item * m * n,
    )


def attention(length, head=128, name="flash_attention", flops=None, direction=""):
    shape = (2, 8, length, head)
    return Op(name=f"aten._scaled_dot_product_{name}{direction}.default", tick=0, phase=Phase.FORWARD,
              op_class=OpClass.CONTRACTION, dtype="bfloat16", shapes=(shape,) * 3,
              flops=flops or 2 * 16 * length * length * 2 * head)


RATE = 1e10
GRID = Grid((16, 1024), (((RATE,) * 2,) * 2,) * 2)
MEASURED = Calibration(
    device="CPU", kind="cpu", processor="", torch="", threads=1, matmuls={"float32": GRID, "bfloat16": GRID},
    batched_matmuls={"float32": Grid((16, 1024), (((2 * RATE,) * 2,) * 2,) * 2)},
    attention={"forward 128": {"float32": Curve((64,), (3e9,))}, "backward 128": {"float32": Curve((64,), (2e9,))}},
    memory={"add": {"float32": Curve((1e3, 1e6), (1e-6, 1e-4))}, "tanh": {"float32": Curve((1e3, 1e6), (1e-5, 1e-3))}},
    host={"forward": 1e-5, "recompute": 1e-4, "backward": 5e-6, "optimizer": 1e-6},
)  # fmt: skip
