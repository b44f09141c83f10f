"""Contexts against what was published, by cards that the figures were not made from too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.backends.cuda_context import DRIVER_UNCERTAINTY, assumed, context
from tightfit.devices import MIB, catalogue, find_device


@pytest.mark.parametrize(("card", "mib"), [("v100-32gb", 319), ("rtx-3090", 256), ("rtx-6000-ada", 426)])
def test_published_contexts_lie_in_the_range(card, mib):
    """The V100 for the Titan V, a chip of as many multiprocessors."""
    found = context(find_device(card))
    assert abs(found.bytes - mib * MIB) <= found.uncertainty + MIB


def test_a_larger_card_of_a_generation_has_a_larger_context():
    for device in catalogue():
        larger = replace(device, units=device.units + 1)
        assert context(larger).bytes > context(device).bytes > DRIVER_UNCERTAINTY
        assert all(0 < figure.uncertainty < figure.bytes for figure in assumed(device))
