"""Refusals' advice, followed as a person would: it ends in a recipe that is accepted, whatever was written first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tightfit.devices import Device, find_device
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import apply_overrides

CPU = Device(kind="cpu", name="cpu", memory_bytes=1 << 30)
CHANGE = re.compile(r"([a-z_][a-z_.]*)(?:=|: (?=\{))(\{[^}]*\}|[^\s,;]+)")
"""A field and its value, as a sentence writes them."""
STATES_ALONE = {"name": "host", "weights": 0, "gradients": 0}

NUMBERS: dict[str, list[Any]] = {
    "optimizer": ["adamw", "adafactor", "sgd", "lion", "muon", "adamw-8bit", "adamw-anyprecision"],
    "precision": ["auto", "bf16", "bf16-pure", "fp16", "fp8", {"name": "fp8", "weights": "bf16"},
                  *({"name": "bf16-pure", "rounding": way} for way in ("stochastic", "nearest"))],
    "offload": ["none", "host"], "update": ["auto", "with-forward"],
}
ORDER: dict[str, list[Any]] = {
    "precision": ["bf16", "fp16"], "offload": ["none", "host", STATES_ALONE],
    "update": ["auto", "after-backward", "with-forward", "in-backward"],
    "accumulation": ["auto", "loop", "by-block", {"name": "by-block", "gradient_sums": "fp32", "sweep": 1}],
    "compile": ["auto", "whole"], "checkpointing": ["auto", "segments"], "parallel": ["none", "ddp"],
}


def advice(reason: str) -> Iterator[list[str]]:
    """What a refusal says to write: each way out, as the changes that it takes."""
    for text in re.findall(r"write ((?:(?!write ).)+)", reason):
        for way in re.split(r",? or ", text):
            if changes := [f"{field}={value}" for field, value in CHANGE.findall(way)]:
                yield changes


@pytest.mark.parametrize("fields", [NUMBERS, ORDER], ids=["numbers", "order"])
@pytest.mark.parametrize("device", [find_device("rtx-4090"), find_device("v100-16gb"), CPU], ids=lambda d: d.name)
def test_advice_ends_in_an_accepted_recipe(fields: dict[str, list[Any]], device: Device) -> None:
    ended: dict[str, bool] = {}

    def follow(values: dict[str, Any], path: tuple[str, ...]) -> None:
        written = repr(sorted(values.items()))
        assert ended.get(written, True), "advice leads in a circle: " + "; ".join(path)
        if written in ended:
            return
        ended[written] = False
        for reason in Recipe.from_dict(values).refusals(device):
            ways = [*advice(reason)]
            assert ways, reason
            for changes in ways:
                if "device=cuda" not in changes:  # which is another machine
                    follow(apply_overrides(values, changes), (*path, f"{reason} -> {' '.join(changes)}"))
        ended[written] = True

    for values in product(*fields.values()):
        follow({"model": "gpt2", "device": device.kind, **dict(zip(fields, values, strict=True))}, ())


@pytest.mark.parametrize("optimizer", NUMBERS["optimizer"])
def test_weights_that_an_optimizer_cannot_update_are_refused_once(optimizer: str) -> None:
    for precision in ("bf16-pure", *(each for each in NUMBERS["precision"] if isinstance(each, dict))):
        assert len(Recipe.from_dict({"optimizer": optimizer, "precision": precision}).refusals(CPU)) <= 1
