"""Overrides that make no model: fewer than one of something that a family is made of, and heads that do not divide what
they share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tightfit.errors import ModelError
from tightfit.shapes.families import body_of, guess

SHARED = (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads"))
"""What is shared out equally, and among how many. A width of heads that is stated is not shared out."""
POSITIONS = "max_position_embeddings"
"""Holds for every family, also where no weight hangs on it."""

WIDEST = 1024
"""Heads that are looked through for a number to suggest."""


def check_overrides(config: Any, stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise ModelError for an override with which no model of the configuration's family can be built, naming it, its
    value and what would do.

    config: a transformers configuration as it is without them. stated: its fields that do not follow from others.
    overrides: under their own names, or under those that all families share, such as `num_hidden_layers`.
    """
    fields = _Fields(config, stated, overrides)
    names, known = _sizes(config)
    for name in (*names, POSITIONS, *(count for _, count in SHARED)):
        value, least = fields.overridden(name), fields.least(name)
        if value is not None and value < least:
            raise ModelError(f"model_overrides.{fields.written(name)}: {value} should be {least} or more")
    for whole, count in SHARED if known else ():
        if whole != "hidden_size" or fields.value("head_dim") is None:
            fields.check_shared(whole, count)


def _sizes(config: Any) -> tuple[list[str], bool]:
    """The whole numbers that the shape of a model is read from, under the names that its family reads, and whether that
    family is known."""
    reading = _Reading(config)
    body = None
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # of odd code's own
        body = body_of(reading)
        if body is None:
            guess(reading)
    return [*reading.sizes], body is not None


class _Reading:
    """A configuration that remembers which of its numbers were read, those that may be left out included."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.sizes: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.config, name)
        if value is None or type(value) is int:
            self.sizes[name] = None
        return value


class _Fields:
    """A configuration's fields as the overrides leave them, by any of their names."""

    def __init__(self, config: Any, stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self._kind = type(config)
        self._aliases: Mapping[str, str] = getattr(config, "attribute_map", {})
        self._written = {self._own(name): name for name in overrides}
        self._values = {**stated, **{self._own(name): value for name, value in overrides.items()}}

    def written(self, name: str) -> str:
        """The field's name as a person wrote it, or else the family's own."""
        return self._written.get(self._own(name), self._own(name))

    def overridden(self, name: str) -> int | None:
        """The number that it was overridden with."""
        return self.value(name) if self._own(name) in self._written else None

    def value(self, name: str) -> int | None:
        """Its number; None where it has none, or one that follows from others."""
        value = self._values.get(self._own(name))
        value = getattr(self._kind, self._own(name), None) if value is None else value
        return value if type(value) is int else None

    def least(self, name: str) -> int:
        """The least that it may be: one, or less where the family's own default stands for none of it."""
        default = getattr(self._kind, self._own(name), None)
        return min(default, 1) if type(default) is int else 1

    def check_shared(self, whole: str, count: str) -> None:
        """Raise ModelError where the one cannot be shared out equally among the other, and either was overridden."""
        total, parts = self.value(whole), self.value(count)
        if total is None or not parts or total % parts == 0:
            return
        divided, divisor = f"{self.written(whole)}={total}", f"{self.written(count)}={parts}"
        if self.overridden(count) is not None:
            nearest = next(n for n in range(min(parts, total, WIDEST), 0, -1) if total % n == 0)
            raise ModelError(f"model_overrides.{self.written(count)}: {parts} does not divide {divided}; write "
                             f"{nearest}, or another number that does")
        if self.overridden(whole) is not None:
            raise ModelError(f"model_overrides.{self.written(whole)}: {total} is not a multiple of {divisor}; write "
                             f"{max(total // parts, 1) * parts}, or another multiple")

    def _own(self, name: str) -> str:
        return self._aliases.get(name, name)
