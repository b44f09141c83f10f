"""How the report writes figures."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.devices import GIB, MIB
from tightfit.text import percent

__all__ = ["byte_unit", "flops_text", "percent", "relative", "seconds_text", "signed_size", "size",
           "time_unit"]  # fmt: skip


def seconds_text(seconds: float | None) -> str:
    """Seconds for reading, three digits; `-` where they are not known."""
    if seconds is None:
        return "-"
    unit, scale = time_unit([abs(seconds)])
    if abs(seconds) >= scale:
        return f"{_digits(seconds / scale)} {unit}"
    return f"{1e9 * seconds:.0f} ns" if abs(seconds) >= 1e-9 else "0"


def size(count: int) -> str:
    """Bytes for reading, three digits; whole bytes below one KiB."""
    unit, scale = byte_unit([abs(count)])
    if abs(count) >= scale:
        return f"{_digits(count / scale)} {unit}"
    return f"{count} B" if count else "0"


def _digits(value: float) -> str:
    """Three digits, and all in front of the point."""
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(3 - whole, 0)}f}"


def signed_size(count: int) -> str:
    """A difference of bytes for reading, with its sign."""
    return f"+{size(count)}" if count > 0 else size(count)


def relative(base: float, other: float) -> str:
    """How far a figure lies from another, as a share of that, with its sign: a prediction from what was measured."""
    if not base:
        return "-"
    value = 100 * (other - base) / base
    if abs(value) < 0.005:
        return "0 %"
    return f"{value:+.2f} %" if abs(value) < 1 else f"{value:+.1f} %" if abs(value) < 1000 else f"{value:+,.0f} %"


def flops_text(rate: float) -> str:
    """FLOPs a second for reading."""
    for unit, scale in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if rate >= scale:
            return f"{rate / scale:,.3g} {unit}"
    return f"{rate / 1e6:,.3g} MFLOP/s" if rate else "-"


def byte_unit(counts: Sequence[float]) -> tuple[str, float]:
    """The unit that an axis of such byte counts is in, and its bytes."""
    most = max(counts, default=0)
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB) if most >= MIB else ("KiB", 1024)


def time_unit(seconds: Sequence[float]) -> tuple[str, float]:
    """The unit that an axis of such times is in, and its seconds."""
    most = max(seconds, default=0.0)
    return ("s", 1.0) if most >= 1 else ("ms", 1e-3) if most >= 1e-3 else ("µs", 1e-6)
