"""How figures are written in sentences."""

from __future__ import annotations

from tightfit.devices import GIB, MIB


def size(count: int) -> str:
    """Bytes for reading: GiB with one decimal, MiB below one GiB, KiB below one MiB, never a rounded 0."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:,.0f} MiB"
    return f"{count / 1024:,.0f} KiB" if abs(count) >= 1024 else f"{count} byte{'s' * (count != 1)}"


def more_or_less(count: int) -> str:
    """A difference in bytes for reading; less than a MiB is none."""
    if abs(count) < MIB:
        return "as much memory"
    return f"{size(abs(count))} {'more' if count > 0 else 'less'}"


def percent(share: float) -> str:
    """A share for reading: whole percents, one decimal below ten."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f} %"
