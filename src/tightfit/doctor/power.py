"""Power leads: what a card of so many watts has to be fed by, and what that asks of the supply.

Plugs as PCI-SIG rates them and the single-GPU guides quote them: the slot gives 75 W, a 6-pin lead 75 W, an 8-pin lead
150 W, a 12-pin or 12V-2x6 lead (12VHPWR before) 500 to 600 W, by what its cable and supply are marked for.
"""

from __future__ import annotations

import re

SLOT, SIX_PIN, EIGHT_PIN, TWELVE_PIN = 75, 75, 150, 600
REST_OF_MACHINE = 250
"""Watts for processor, disks and fans: an allowance, not a measurement."""
RESERVE = 1.25
"""Supply over load, as a rule of thumb: cards draw more than their limit for milliseconds."""

MODULES = re.compile(r"SXM|HBM3|\bH20\b|\bH200$|\bB[23]00\b|\bG[BH]\d{2,3}\b|Laptop|Max-Q|Orin|Thor", re.IGNORECASE)
"""Names of cards that sit on a board of their own, or in a laptop, and have no leads. `NVIDIA H100 80GB HBM3` and
`NVIDIA H200` are the SXM modules; the ones with leads are called PCIe or NVL."""


def has_leads(name: str) -> bool:
    """Whether a card of that name plugs into a slot and is fed by leads."""
    return MODULES.search(name) is None


def leads(watts: float) -> str | None:
    """The least leads that carry a power limit, the slot's share taken off, by the sockets that a card may have; None
    above what leads carry."""
    need = watts - SLOT
    if need <= 0:
        return "none: the slot's 75 W carry it"
    if need <= SIX_PIN:
        return "one 6-pin (75 W) or one 8-pin (150 W)"
    if need <= EIGHT_PIN:
        return "one 8-pin (150 W)"
    if need <= EIGHT_PIN + SIX_PIN:
        return "an 8-pin (150 W) and a 6-pin (75 W), two 8-pin, or one 12V-2x6 (12-pin)"
    if need <= 2 * EIGHT_PIN:
        return "two 8-pin (150 W each), or one 12V-2x6 (12-pin, 500 to 600 W)"
    if need <= 3 * EIGHT_PIN:
        return "three 8-pin (150 W each), or one 12V-2x6 (12-pin, 500 to 600 W)"
    if need <= TWELVE_PIN:
        return "one 12V-2x6 (12-pin) marked for 600 W, or its adapter with four 8-pin (150 W each)"
    return None


def supply(limits: list[float]) -> int:
    """Watts that a power supply should be rated at for cards of those limits, in steps of 50 W."""
    load = (sum(limits) + REST_OF_MACHINE) * RESERVE
    return int(-(-load // 50) * 50)
