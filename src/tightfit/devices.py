"""The device a recipe runs on, as far as choosing and refusing techniques needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor that trains: its kind, and what its hardware can do."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    """Total memory of the device; host memory for the CPU."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for the CPU."""

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether this is a CUDA device of at least that compute capability."""
        return self.capability is not None and self.capability >= (major, minor)
