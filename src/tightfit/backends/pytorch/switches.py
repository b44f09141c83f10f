"""Switches of models' configurations that training turns off, and that a saved model has as they were loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn

TURNED_OFF = "_turned_off"
"""Attribute of a module: the switches of its configuration that were on."""


def turn_off(model: nn.Module, switch: str) -> None:
    """Turn a switch off in the configuration of each of transformers' models among the modules: T5's decoder, for one,
    has its own."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) and getattr(part.config, switch, False):
            setattr(part.config, switch, False)
            setattr(part, TURNED_OFF, {*getattr(part, TURNED_OFF, ()), switch})


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """The model's configurations with every switch that was turned off on again."""
    switches: list[tuple[Any, str]] = [(part.config, switch) for part in model.modules()
                                       for switch in vars(part).get(TURNED_OFF, ())]
    for config, switch in switches:
        setattr(config, switch, True)
    try:
        yield
    finally:
        for config, switch in switches:
            setattr(config, switch, False)
