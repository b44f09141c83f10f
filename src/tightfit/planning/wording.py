"""How figures are written in sentences."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


def size(count: int) -> str:
    """Bytes for reading: GiB with one decimal, MiB below one GiB."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / MIB:,.0f} MiB" if abs(count) >= MIB else f"{count / 1024:,.0f} KiB"


def percent(share: float) -> str:
    """A share for reading: whole percents, one decimal below ten."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f} %"
