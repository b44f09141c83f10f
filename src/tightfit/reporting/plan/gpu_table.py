"""The catalogue of GPUs as a table."""

from __future__ import annotations

from rich import box
from rich.table import Table

from tightfit.devices import catalogue
from tightfit.planning.wording import size


def gpu_table() -> Table:
    """What to write as `--gpu`, and the figures that plans are made with."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("--gpu", no_wrap=True)
    for heading in ("memory", "GB/s", "capability", "16-bit TFLOP/s"):
        table.add_column(heading, justify="right")
    for device in catalogue():
        major, minor = device.capability or (0, 0)
        half = max(device.flops.get("bf16", 0.0), device.flops.get("fp16", 0.0))
        name = device.name.lower().replace(" ", "-")
        figures = (f"{device.bandwidth / 1e9:,.0f}", f"{major}.{minor}", f"{half / 1e12:,.0f}")
        table.add_row(name, size(device.memory_bytes), *figures)
    return table
