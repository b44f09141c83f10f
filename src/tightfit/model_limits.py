"""Overrides that make no model: fewer than one of something that it is made of, and heads that do not divide what they
share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tightfit.errors import ModelError

SIZES = re.compile(r"(size|dim|heads?|(?<!window_)layers?|embd|inner|positions|embeddings|d_model|d_ff|d_kv)$")
"""Names of fields that count something of which a model has at least one."""

SHARED = (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads"))
"""Fields that are shared out equally, and among how many. A width of heads that is stated is not shared out."""

WIDEST = 1024
"""Heads that are looked through for a number to suggest."""


def check_overrides(config: Any, stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise ModelError for an override with which no model of the configuration's family can be built, naming it, its
    value and what would do.

    config: a transformers configuration as it is without them. stated: its fields that do not follow from others.
    overrides: under their own names, or under those that all families share, such as `num_hidden_layers`.
    """
    fields = _Fields(config, stated, overrides)
    for name, value in overrides.items():
        least = fields.least(name)
        if type(value) is int and SIZES.search(fields.own(name)) and value < least:
            raise ModelError(f"model_overrides.{name}: {value} should be {least} or more")
    for whole, count in SHARED:
        if whole != "hidden_size" or not fields.states_head_width():
            fields.check_shared(whole, count)


class _Fields:
    """A configuration's fields as the overrides leave them, by any of their names."""

    def __init__(self, config: Any, stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self._kind = type(config)
        self._aliases: Mapping[str, str] = getattr(config, "attribute_map", {})
        self._written = {self.own(name): name for name in overrides}
        self._values = {**stated, **{self.own(name): value for name, value in overrides.items()}}

    def own(self, name: str) -> str:
        """The family's own name of a field."""
        return self._aliases.get(name, name)

    def value(self, name: str) -> int | None:
        """Its number; None where it has none, or one that follows from others."""
        value = self._values.get(self.own(name))
        value = getattr(self._kind, self.own(name), None) if value is None else value
        return value if type(value) is int else None

    def least(self, name: str) -> int:
        """The least that it may be: one, or less where the family's own default stands for none of it."""
        default = getattr(self._kind, self.own(name), None)
        return min(default, 1) if type(default) is int else 1

    def states_head_width(self) -> bool:
        names = {"head_dim", *(name for name in (*self._values, *vars(self._kind)) if "head_dim" in name)}
        return any(self.value(name) is not None for name in names)

    def check_shared(self, whole: str, count: str) -> None:
        """Raise ModelError where the one cannot be shared out equally among the other, and either was overridden."""
        total, parts = self.value(whole), self.value(count)
        if total is None or not parts or total % parts == 0:
            return
        whole_name, count_name = (self._written.get(self.own(name)) for name in (whole, count))
        divided, divisor = f"{whole_name or self.own(whole)}={total}", f"{count_name or self.own(count)}={parts}"
        if count_name is not None:
            nearest = next(n for n in range(min(parts, total, WIDEST), 0, -1) if total % n == 0)
            raise ModelError(f"model_overrides.{count_name}: {parts} does not divide {divided}; write {nearest}, or "
                             "another number that does")
        if whole_name is not None:
            raise ModelError(f"model_overrides.{whole_name}: {total} is not a multiple of {divisor}; write "
                             f"{max(total // parts, 1) * parts}, or another multiple")
