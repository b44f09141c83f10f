"""The same recipe planned for several GPUs, or for every one of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tightfit.devices import Device, find_device
from tightfit.errors import RecipeError, Refused
from tightfit.planning.estimate import Tools
from tightfit.planning.plan import Candidate, Interrupted, Plan
from tightfit.planning.search.evaluate import Evaluator, InProcess, Progress
from tightfit.planning.search.search import search
from tightfit.planning.whole_run import WholeRun, parse_price
from tightfit.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """One GPU. plan: None where the recipe is refused on it, with the reason in `refused`. price: in whatever unit
    the caller counts; None where none was given."""

    device: Device
    plan: Plan | None = None
    refused: str = ""
    price: float | None = None

    @property
    def chosen(self) -> Candidate | None:
        return None if self.plan is None else self.plan.chosen

    @property
    def speed(self) -> float:
        """Tokens a second of the choice, samples for images; 0 where nothing fits."""
        return 0.0 if self.chosen is None else self.chosen.estimate.time.throughput

    def whole_run(self, tokens: int) -> WholeRun | None:
        """Length and cost of a whole run, as `Plan.whole_run`. tokens: 0 where nobody said how many."""
        return None if self.plan is None else replace(self.plan, tokens=tokens, price=self.price).whole_run

    @property
    def per_price(self) -> float | None:
        """`speed` for one unit of the price; None without a price, or where nothing fits."""
        return None if self.price is None or self.chosen is None else self.speed / self.price

    @property
    def ranked_by(self) -> float:
        """`per_price`, and `speed` without a price."""
        return self.per_price or self.speed

    @property
    def unsure_by(self) -> float:
        """The most by which `ranked_by` is off in nine predictions of ten, where that is known."""
        return 0.0 if self.chosen is None else self.ranked_by * (self.chosen.estimate.time.error or 0.0)

    def to_json(self, tokens: int = 0) -> dict[str, Any]:
        """The plan's plain values, less all candidates but the best, and what is said of this GPU beside them."""
        device = {"name": self.device.name, "memory_bytes": self.device.memory_bytes}
        plan = {} if self.plan is None else replace(self.plan, candidates=self.plan.candidates[:1], tokens=tokens,
                                                    price=self.price).to_json()
        return {"device": device, "candidates": [], **plan, "refused": self.refused or None, "price": self.price,
                "per_price": self.per_price}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A recipe planned for each GPU, the best first: by throughput per price where prices were given, else by
    throughput, those with milder numerics before those on which only harsher ones fit; then those on which nothing
    fits, those that miss least first; then those that refuse it. tokens: as of `Plan`."""

    asked: Recipe
    rows: tuple[GpuRow, ...]
    tokens: int = 0

    @property
    def best(self) -> GpuRow | None:
        """The first one; None where the recipe fits none of them."""
        return next((row for row in self.rows if row.chosen is not None), None)

    @property
    def close(self) -> tuple[GpuRow, ...]:
        """Those behind the best one, of as mild numerics, that predictions cannot tell from it: whose errors, taken
        together, are more than the difference."""
        first = self.best
        return () if first is None or first.chosen is None else tuple(
            row for row in self.rows
            if row is not first and row.chosen is not None and (row.price is None) == (first.price is None)
            and row.chosen.numerics_change == first.chosen.numerics_change
            and first.ranked_by - row.ranked_by < math.hypot(first.unsure_by, row.unsure_by))

    def to_json(self) -> dict[str, Any]:
        best = None if self.best is None else self.best.device.name
        return {"best": best, "close": [row.device.name for row in self.close],
                "gpus": [row.to_json(self.tokens) for row in self.rows]}

    def priced(self, prices: Mapping[str, float]) -> Comparison:
        """The comparison at these prices by `Device.name`, and in the order that they make."""
        rows = (replace(row, price=prices.get(row.device.name)) for row in self.rows)
        return replace(self, rows=tuple(sorted(rows, key=_place)))


def compare(
    recipe: Recipe,
    devices: Iterable[Device],
    tools: Tools,
    progress: Progress | None = None,
    evaluator: Evaluator | None = None,
) -> Comparison:
    """Plan the recipe for each CUDA device, like with like: numerics change only where nothing milder fits, whatever
    the recipe allows.

    evaluator: as of `search`. Raises ModelError as `search` does, and Interrupted.
    """
    ordered = sorted(devices, key=lambda d: d.capability or (0, 0))  # alike ones share their traces
    shared, mild = evaluator or InProcess(tools), recipe.model_copy(update={"allow_numerics": False})
    rows: list[GpuRow] = []
    for number, device in enumerate(ordered):
        tell = progress and partial(_tell, progress, number, len(ordered), device.name)
        try:
            plan = search(mild, device, tools, progress=tell, comparing=True, evaluator=shared)
            rows.append(GpuRow(device=device, plan=plan))
        except Refused as error:
            rows.append(GpuRow(device=device, refused=str(error)))
        except KeyboardInterrupt:
            if not rows:
                raise
            found = Comparison(asked=recipe, rows=tuple(rows)).priced({})
            raise Interrupted(found, f"{len(rows)} of {len(ordered)} GPUs were planned") from None
    return Comparison(asked=recipe, rows=tuple(rows)).priced({})


def parse_prices(given: Sequence[str]) -> dict[str, float]:
    """`NAME=x` for each GPU, as prices by `Device.name`. Raises RecipeError for other texts, names and numbers."""
    prices: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition("=")
        price = parse_price(number, f"price: {text!r} should be a GPU's name and a number above 0, such as "
                            "rtx-4090=0.35")
        try:
            device = find_device(name)
        except RecipeError as error:  # which speaks of --gpu, and ends in the names to choose from
            reason, *_, names = str(error).removeprefix("gpu: ").split("; ")
            raise RecipeError(f"price: {text!r}: {reason}; {names}") from None
        if device.name in prices:
            raise RecipeError(f"price: {device.name} has two prices; keep one of them")
        prices[device.name] = price
    return prices


def _tell(progress: Progress, number: int, count: int, name: str, done: int, most: int | None, text: str) -> None:
    progress(number, count, f"{name}: {text}")


def _place(row: GpuRow) -> tuple[int, tuple[int, int], float, float]:
    if row.chosen is not None:
        return 0 if row.price is not None else 1, row.chosen.numerics_change, -row.ranked_by, 0.0
    nearest = row.plan.candidates[0].estimate.missing if row.plan is not None and row.plan.candidates else math.inf
    return (2 if row.plan is not None else 3), (0, 0), nearest, row.device.memory_bytes
