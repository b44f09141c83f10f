"""Bars whose letters stand for bytes, and what the letters mean."""

from __future__ import annotations

from tests.display.plans import CARD, GIB, memory
from tightfit.display.memory_bar import cells_of, legend, memory_bar, parts_of, scale_of


def test_parts_sum_to_what_is_used():
    one = memory()
    assert sum(parts_of(one).values()) == one.used == 14 * GIB
    assert list(parts_of(one)) == ["weights", "gradients", "optimizer", "activations", "temporary", "other", "cached",
                                   "context"]


def test_a_bar_is_drawn_to_scale():
    bar = memory_bar(parts_of(memory()), CARD.memory_bytes, CARD.memory_bytes, 48).plain
    assert bar == "WWGGOOOOAAAAAAAAAAAATTTRCCXX" + 20 * "." + "|"


def test_a_bar_passes_the_devices_end_in_small_letters_where_it_does_not_fit():
    large = memory(2.0)
    assert large.used == 26 * GIB
    scale = scale_of([large.used, memory().used], CARD.memory_bytes)
    assert scale == large.used
    bar = memory_bar(parts_of(large), CARD.memory_bytes, scale, 26).plain
    assert bar == "WWGGOOOOAAAAAAAAAAAATTTR|cx"
    short = memory_bar(parts_of(memory()), CARD.memory_bytes, scale, 26).plain
    assert (short.index("."), short.index("|")) == (14, 24)


def test_what_barely_misses_still_passes_the_end():
    large = memory(22.01 / 12)
    bar = memory_bar(parts_of(large), CARD.memory_bytes, scale_of([large.used], CARD.memory_bytes), 10).plain
    assert not bar.endswith("|")
    assert "|" in bar


def test_what_is_far_too_large_beside_one_that_fits_is_cut_off_and_not_squeezed():
    huge = memory(20.0)
    scale = scale_of([memory().used, huge.used], CARD.memory_bytes)
    assert scale == 36 * GIB
    assert memory_bar(parts_of(huge), CARD.memory_bytes, scale, 36).plain == 20 * "W" + 4 * "G" + "|" + 11 * "g" + ">"


def test_where_nothing_fits_every_bar_is_seen_whole():
    """242 and 122 GiB on a card of 24: a tenth of the longest bar is the card."""
    both = [memory(20.0), memory(10.0)]
    scale = scale_of([one.used for one in both], CARD.memory_bytes)
    assert scale == both[0].used == 242 * GIB
    bars = [memory_bar(parts_of(one), CARD.memory_bytes, scale, 30).plain for one in both]
    assert [bar.index("|") for bar in bars] == [3, 3]
    assert bars[0] == "WWG|ggooooo" + 13 * "a" + "ttttrcx"
    assert len(bars[1]) == 16
    assert ">" not in "".join(bars)


def test_the_smallest_need_is_seen_and_no_need_is_none():
    tiny = memory(1e-6, peak_reserved=round(12e-6 * GIB), context=0)
    assert memory_bar(parts_of(tiny), CARD.memory_bytes, CARD.memory_bytes, 10).plain == "A.........|"
    empty = memory(0.0, peak_allocated=0, peak_reserved=0, context=0)
    assert memory_bar(parts_of(empty), CARD.memory_bytes, CARD.memory_bytes, 10).plain == "..........|"


def test_the_legend_names_what_the_bars_have():
    text = legend([memory()], CARD.memory_bytes, 80).plain
    assert "W weights" in text
    assert "| 24.0 GiB, end of the device's memory" in " ".join(text.split())
    assert "small letters" not in text
    assert "X context" in text
    assert "KV cache" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(len(line.split("  ")) == 1 for line in legend([memory()], CARD.memory_bytes, 12).plain.splitlines())
    cached = memory(by_category={**memory().by_category, "kv-cache": 5})
    assert "K KV cache" in legend([cached], CARD.memory_bytes, 80).plain
    passing = legend([memory(), memory(2.0)], CARD.memory_bytes, 80).plain
    assert "small letters: beyond it" in passing
    assert "> cut off" not in passing
    assert "> cut off" in legend([memory(), memory(20.0)], CARD.memory_bytes, 80).plain


def test_a_part_too_small_for_a_cell_is_seen_all_the_same():
    held = {"weights": 100, "gradients": 100, "optimizer": 200, "activations": 900, "temporary": 3, "context": 1}
    assert letters(held, 20) == "WWGOOOAAAAAAAAAAAATX"
    assert letters(held, 6) == "WGOATX"


def test_more_parts_than_cells_leave_the_largest():
    held = {"weights": 100, "gradients": 90, "optimizer": 200, "activations": 900, "temporary": 3}
    assert letters(held, 3) == "WOA"
    assert letters(held, 1) == "A"
    assert letters({}, 0) == ""


def letters(held, count):
    return "".join(part.letter for part in cells_of(held, count))
