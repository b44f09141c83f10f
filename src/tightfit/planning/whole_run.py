"""Length and cost of a whole run, from a plan's speed and the tokens to train on."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.errors import RecipeError
from tightfit.planning.costs import Time
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.text import figure

MOST_TOKENS = 10**15
"""More than any run is of: a slip of the hand, and not a run to plan."""
LENGTH_UNITS = ((1.5, "hours", 1.0), (1 / 30, "minutes", 1 / 60), (0.0, "seconds", 1 / 3600))
"""Units of a run's length: hours from which each is used, and the hours in it."""
DAYS_FROM = 72.0
"""Hours from which a run's length is said in days too."""
COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """A run over so many tokens; samples for images, as `unit` says.

    hours: at the predicted speed, with `startup_seconds` before the first step. low, high: hours at the ends of its
        interval; as `hours` where that is not known.
    cost: of all GPUs, in the price's unit; None without a price.
    """

    tokens: int
    unit: str
    hours: float
    low: float
    high: float
    startup_seconds: float = 0.0
    cost: float | None = None

    @classmethod
    def of(cls, recipe: Recipe, time: Time, tokens: int, price: float | None = None) -> WholeRun:
        """recipe: resolved. price: of all GPUs for an hour."""
        steps, error, before = tokens / time.throughput, time.error or 0.0, startup(recipe)
        hours, low, high = ((before + steps / by) / 3600 for by in (1, 1 + error, 1 - error))
        return cls(tokens=tokens, unit=time.unit.removesuffix("/s"), hours=hours, low=low, high=high,
                   startup_seconds=before, cost=None if price is None else hours * price)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        unit, scale = unit_of(self.hours)
        around = "" if self.high == self.low else f" ({self.low / scale:,.1f} to {self.high / scale:,.1f})"
        days = f", {self.hours / 24:,.1f} days," * (self.hours >= DAYS_FROM)
        cost = "" if self.cost is None else f", cost {figure(self.cost, 2)} at {self.cost / self.hours:.6g} an hour"
        before = f", compiling for {self.startup_seconds:.0f} s or so counted" if self.startup_seconds else ""
        return f"{self.hours / scale:,.1f} {unit}{around}{days} for {self.tokens:,} {self.unit}{before}{cost}"


def steps_of(recipe: Recipe, begins: bool = False) -> int:
    """Steps of the run that a recipe was written for, by default only where it begins; 0 where it says none."""
    trains = recipe.mode == "train" and recipe.num_train_epochs is None  # of epochs nobody knows yet how many they are
    asked = begins or "max_steps" in recipe.model_fields_set
    return recipe.max_steps if trains and asked else 0


def startup(recipe: Recipe) -> float:
    """Seconds before the first step of a resolved recipe, such as a compiler's."""
    techniques = (getattr(recipe, slot) for slot in SLOTS)
    return max(float(technique.startup_seconds) for technique in techniques if technique != "auto")


def unit_of(hours: float) -> tuple[str, float]:
    """The unit in which a run of such length is written, and its hours."""
    return next((unit, scale) for least, unit, scale in LENGTH_UNITS if hours >= least)


def parse_tokens(text: str) -> int:
    """`500M`, `1.5B` or `20000`, as a number of tokens. Raises RecipeError."""
    digits = text.strip().replace(",", "").replace("_", "")
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", digits, re.IGNORECASE)
    count = float(found[1]) * COUNT_SUFFIXES[found[2].upper()] if found else 0.0
    if not 1 <= count <= MOST_TOKENS:
        raise RecipeError(f"tokens: {text!r} should be a number of tokens up to 1000T, such as 500M or 1.5B")
    return round(count)


def parse_price(text: str, wrong: str) -> float:
    """Price of a GPU for an hour. Raises RecipeError with the sentence `wrong`."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise RecipeError(wrong)
    return price
