"""How many published speeds lie within the interval of their prediction, and the errors of cards that make it so."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tightfit.devices import find_device
from tightfit.planning.timing.uncertainty import CARD_ERROR

Row = dict[str, Any]
SHARE = 0.9
"""Of the runs, within their interval."""


def interval(row: Row) -> float:
    """The error that is stated of a compared row's speed, as a share of the prediction."""
    return math.hypot(CARD_ERROR[find_device(row["card"]).evidence], row["speed"]["work_error"])


def needed(row: Row) -> float:
    """The error with which the interval would just hold the published speed."""
    return abs(float(row["speed"]["published"]) / float(row["speed"]["predicted"]) - 1)


def card_error(rows: Sequence[Row]) -> float:
    """The error of cards beyond that of their kinds of work with which SHARE of the rows lie within their interval."""
    beyond = sorted(math.sqrt(max(needed(row) ** 2 - row["speed"]["work_error"] ** 2, 0.0)) for row in rows)
    return beyond[math.ceil(SHARE * len(beyond)) - 1] if beyond else 0.0


def intervals(rows: Iterable[Row]) -> dict[str, Any]:
    """Rows inside their interval, and inside with their own card left out of the fit of its kind's error; the errors
    of cards, and the median interval."""
    timed = [row for row in rows if "speed" in row]
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in timed:
        kinds[find_device(row["card"]).evidence].append(row)
    return {
        "all": _inside(timed, kinds),
        "plain": _inside([row for row in timed if not row["kernels"]], kinds),
        "special": _inside([row for row in timed if row["kernels"]], kinds),
        **{kind: {**_inside(kinds[kind], kinds), "card_error": round(card_error(kinds[kind]), 4)}
           for kind in CARD_ERROR},
    }


def _inside(rows: Sequence[Row], kinds: dict[str, list[Row]]) -> dict[str, Any]:
    left_out = 0
    for row in rows:
        others = [other for other in kinds[find_device(row["card"]).evidence] if other["card"] != row["card"]]
        left_out += needed(row) <= math.hypot(card_error(others), row["speed"]["work_error"])
    widths = sorted(map(interval, rows))
    return {"rows": len(rows), "inside": sum(needed(row) <= interval(row) for row in rows),
            "inside_left_out": left_out, "median_interval": round(widths[len(widths) // 2], 4) if widths else 0.0}
