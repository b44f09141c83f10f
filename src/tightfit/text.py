"""Figures for reading: bytes, seconds, shares, rates and counts, each written in one way everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
RATES = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6))


def size(count: float) -> str:
    """Bytes: three digits, one of them behind the point at most. `19.4 GiB`, `724 MiB`, `8.0 MiB`, `512 B`."""
    unit, scale = _unit(BYTES, count)
    return f"{_digits(count / scale, 0 if scale == 1 else 1)} {unit}"


def around(value: float, error: float) -> str:
    """A figure and how far it may be off, in thousands from 1,000 on, by the error's first two digits: `8.3k ± 1.2k`,
    `157k ± 25k`, `20.0 ± 3.1`."""
    scale, unit = (1000, "k") if abs(value) >= 1000 else (1, "")
    decimals = max(1 - math.floor(math.log10(error / scale)), 0) if error > 0 else 1
    return f"{value / scale:,.{decimals}f}{unit} ± {error / scale:,.{decimals}f}{unit}"


def signed_size(count: float) -> str:
    """A difference in bytes, with its sign."""
    return f"+{size(count)}" if count > 0 else size(count)


def more_or_less(count: int) -> str:
    """A difference in bytes, in words; less than a MiB is none."""
    if abs(count) < 1 << 20:
        return "as much memory"
    return f"{size(abs(count))} {'more' if count > 0 else 'less'}"


def seconds(value: float | None) -> str:
    """Seconds: three digits. `3.05 ms`, `1.71 s`; minutes from two on, `10.0 min`; `-` where they are not known."""
    if value is None:
        return "-"
    if abs(value) >= 120:
        return f"{_digits(value / 60, 1)} min"
    unit, scale = _unit(SECONDS, value)
    return f"{_digits(value / scale, 0 if unit == 'ns' else 2)} {unit}" if abs(value) >= 1e-9 else "0"


def percent(share: float) -> str:
    """A share: whole percents, one decimal below ten."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f} %"


def relative(base: float, other: float) -> str:
    """Difference of a figure from another, as a share of that one, with its sign; `-` where that one is 0."""
    if not base:
        return "-"
    value = 100 * (other - base) / base
    if abs(value) < 0.005:
        return "0 %"
    return f"{value:+.2f} %" if abs(value) < 1 else f"{value:+.1f} %" if abs(value) < 1000 else f"{value:+,.0f} %"


def flops(rate: float) -> str:
    """FLOPs a second: three digits; `-` for none."""
    unit, scale = _unit(RATES, rate)
    return f"{_digits(rate / scale, 2)} {unit}" if rate else "-"


def counted(count: int, noun: str) -> str:
    """A number of things: `1 trace`, `1,234 combinations`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def figure(value: float, decimals: int = 0) -> str:
    """A figure above 0: three significant digits and so many decimals at least. `12,345`, `4.40`, `0.0313`."""
    return f"{value:,.{max(2 - math.floor(math.log10(value)), decimals)}f}"


def shape(sides: Sequence[int]) -> str:
    """A tensor's shape: `8x1024x768`; `scalar` without sides."""
    return "x".join(map(str, sides)) or "scalar"


def byte_unit(counts: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis of such byte counts, and its bytes."""
    return _unit(BYTES[:-1], max(counts, default=0))


def time_unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis of such times, and its seconds."""
    return _unit(SECONDS[:-1], max(values, default=0.0))


def _unit(units: Sequence[tuple[str, float]], value: float) -> tuple[str, float]:
    """The largest unit that the value holds one of, else the smallest."""
    return next((unit for unit in units if abs(value) >= unit[1]), units[-1])


def _digits(value: float, decimals: int) -> str:
    """Three digits, `decimals` of them behind the point at most, and all in front of it."""
    return f"{value:,.{min(max(3 - len(str(int(abs(value)))), 0), decimals)}f}"
