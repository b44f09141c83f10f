"""The processor, and a recipe that leaves no technique open and has the first of each."""

from __future__ import annotations

from typing import Any

from tightfit.devices import Device

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
PLAIN: dict[str, Any] = {"precision": "fp32", "attention": "sdpa", "compile": "off", "loss": "plain",
                         "checkpointing": "none", "optimizer": "adamw"}
