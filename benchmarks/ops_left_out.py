"""Times of recorded ops with what they are predicted from fitted without their own card."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

from op_recordings import Row, device, summary
from tightfit.planning.timing import contractions, op_times
from tightfit.planning.timing.contractions import Matmul
from tightfit.planning.timing.op_times import ITEM_BYTES, op_seconds
from tightfit.trace import Op, OpClass

LEFT_OUT = 900
"""Rows of each card that fits with cards left out take."""


class Timed(NamedTuple):
    """A recorded product, and its seconds as the model has them: in tiles at the full clock, with all of the card's
    peak, and its bytes alone."""

    recorded: float
    tiles: float
    at_peak: float
    moved: float

    def error(self, share: float) -> float:
        """With that share of the peak sustained."""
        busy = max(self.tiles, self.at_peak / share) + op_times.CLASS_START[OpClass.CONTRACTION]
        return max(busy, self.moved) / self.recorded - 1


def timed(row: Row, made: Op, prologue: int, full: float) -> Timed:
    """A product with other constants than the model's own."""
    card = device(row["device"])
    product = Matmul(1, row["m"], row["n"], row["k"], made.leading)
    rate = card.peak(row["dtype"]) * full * contractions.alignment(product, ITEM_BYTES[row["dtype"]], card)
    return Timed(float(row["microseconds"]) * 1e-6,
                 contractions.matmul_seconds(product, rate, card.units, prologue),
                 made.flops / card.peak(row["dtype"]), op_seconds(replace(made, flops=0), card))


def left_out(found: list[tuple[Row, Op]]) -> dict[str, Any]:
    """16-bit products, each card left out of the fit in turn."""
    cards: dict[str, list[tuple[Row, Op]]] = defaultdict(list)
    for row, made in found:
        if row["dtype"] == "bfloat16":
            cards[row["device"]].append((row, made))
    chooser = random.Random(0)
    cards = {name: chooser.sample(each, min(len(each), LEFT_OUT)) for name, each in cards.items()}
    fits = {setting: {name: [timed(*pair, *setting) for pair in each] for name, each in cards.items()}
            for setting in itertools.product((100, 150, 200), (0.8, 0.85, 0.9))}
    result = {}
    for name in cards:
        def error(setting: tuple[int, float], own: str = name) -> float:
            return sum(fitted(each)[1] for other, each in fits[setting].items() if other != own)

        best = min(fits, key=error)
        own = fits[best][name]
        share = fitted(own[::2])[0]
        result[name] = {"prologue": best[0], "full_clock_share": best[1], "share": share,
                        **summary([each.error(share) for each in own[1::2]])}
    return result


def fitted(found: list[Timed]) -> tuple[float, float]:
    """The share of the peak with the least median error, and that error."""
    return min(((share / 100, statistics.median(abs(each.error(share / 100)) for each in found))
                for share in range(40, 110, 2)), key=lambda pair: pair[1])


def attention_left_out(found: list[tuple[Row, Op]]) -> dict[str, Any]:
    """Attention, with the rates of its kernel fitted on the other cards of the recordings alone."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, made in found:
        ratio = float(row["microseconds"]) / op_seconds(made, device(row["device"])) / 1e6
        ratios[row["backend"].split()[0], row["direction"]][row["device"]].append(ratio)
    errors: dict[str, list[float]] = defaultdict(list)
    for (_, direction), cards in ratios.items():
        for name, own in cards.items():
            others = [ratio for other, each in cards.items() if other != name for ratio in each]
            if others:
                errors[direction] += [statistics.median(others) / ratio - 1 for ratio in own]
    return {direction: summary(each) for direction, each in errors.items()}
