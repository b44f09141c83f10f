"""Figures for reading, of every size and sign."""

from __future__ import annotations

import pytest

from tightfit import text


@pytest.mark.parametrize(("written", "expected"), [
    (text.seconds(0.0), "0"), (text.seconds(3e-12), "0"), (text.seconds(1.234e-5), "12.3 µs"),
    (text.seconds(0.00305), "3.05 ms"), (text.seconds(0.1384), "138 ms"), (text.seconds(1.7087), "1.71 s"),
    (text.seconds(-2.0), "-2.00 s"), (text.seconds(600), "10.0 min"), (text.seconds(12345.6), "206 min"),
    (text.seconds(None), "-"),
    (text.size(0), "0 B"), (text.size(512), "512 B"), (text.size(1 << 20), "1.0 MiB"),
    (text.size(25 << 30), "25.0 GiB"), (text.size(242 << 30), "242 GiB"), (text.size(5000 << 30), "5,000 GiB"),
    (text.signed_size(2048), "+2.0 KiB"), (text.signed_size(-2048), "-2.0 KiB"),
    (text.more_or_less(1000), "as much memory"), (text.more_or_less(-3 << 30), "3.0 GiB less"),
    (text.relative(0, 5), "-"), (text.relative(100, 99.5), "-0.50 %"), (text.relative(1e6, 1e6 - 1), "0 %"),
    (text.relative(2, 3), "+50.0 %"), (text.percent(0.0123), "1.2 %"), (text.percent(0.5), "50 %"),
    (text.around(8265, 1240), "8.3k ± 1.2k"), (text.around(57_123, 9_012), "57.1k ± 9.0k"),
    (text.around(157_000, 25_100), "157k ± 25k"), (text.around(1_200, 120), "1.20k ± 0.12k"),
    (text.around(20.04, 3.1), "20.0 ± 3.1"), (text.around(20, 0), "20.0 ± 0.0"),
    (text.flops(0.0), "-"), (text.flops(3.2e13), "32.0 TFLOP/s"), (text.counted(1, "trace"), "1 trace"),
    (text.counted(1234, "trace"), "1,234 traces"), (text.shape((2, 64)), "2x64"), (text.shape(()), "scalar"),
])
def test_figures_for_reading(written, expected):
    assert written == expected


def test_the_unit_of_an_axis_is_that_of_its_largest_figure():
    assert text.byte_unit([3, 5 << 20]) == ("MiB", 1 << 20)
    assert text.byte_unit([]) == ("KiB", 1 << 10)
    assert text.time_unit(iter([0.002, 0.5])) == ("ms", 1e-3)
