"""A GPU's description for XLA: every card has one, and it says what XLA's own description of that card says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tightfit.backends.jax.compiled.predict import target_description
from tightfit.devices import catalogue, find_device
from tightfit.errors import Refused

A6000 = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
    "shared_memory_per_core": 102400, "threads_per_core_limit": 1536, "core_count": 84, "fpus_per_core": 128,
    "memory_bandwidth": 768096000000, "l2_cache_size": 6291456, "clock_rate_ghz": 1.8,
    "device_memory_size": 51041271808, "shared_memory_per_block_optin": 101376, "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536, "major": 8, "minor": 6,
}  # fmt: skip
H100 = {
    "shared_memory_per_core": 233472, "threads_per_core_limit": 2048, "core_count": 132, "fpus_per_core": 128,
    "memory_bandwidth": 3352320000000, "l2_cache_size": 52428800, "clock_rate_ghz": 1.98,
    "device_memory_size": 84942979072, "shared_memory_per_block_optin": 232448, "major": 9, "minor": 0,
}  # fmt: skip
"""From OpenXLA's device specifications, read off the cards."""


@pytest.mark.parametrize(("name", "known"), [("rtx-a6000", A6000), ("h100-sxm", H100)])
def test_a_card_is_described_as_xla_describes_it(name, known):
    text = target_description(find_device(name))
    for field, value in known.items():
        found = re.search(rf"\b{field}: ([\d.]+)", text)
        assert found is not None, field
        assert float(found[1]) == pytest.approx(value, rel=0.03), field


@pytest.mark.parametrize("device", catalogue(), ids=lambda device: device.name)
def test_every_card_of_the_catalogue_has_a_description(device):
    assert f'"{device.name}"' in target_description(device)


def test_a_card_without_figures_is_refused():
    with pytest.raises(Refused, match=r"figures are not known.*--gpu"):
        target_description(replace(find_device("rtx-a5000"), capability=(6, 1)))
