"""Plans that wait for a measurement: made on any machine, so that the time on a GPU goes into measuring.

A file for each benchmark and card, in build/gpu_plans/, of JSON lines. A plan serves the versions of PyTorch and
transformers, and the source, that it was made with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import record
import tightfit
from tightfit.devices import Device, find_device
from tightfit.errors import RecipeError
from tightfit.ladder.rows import append
from tightfit.system import version_of

FOLDER = Path(__file__).resolve().parent.parent / "build" / "gpu_plans"


class GpuPlans:
    """The plans of one benchmark for one card, by their keys; the newest of each."""

    def __init__(self, benchmark: str, device: Device) -> None:
        self.path = FOLDER / f"{benchmark}-{record.slug(card_name(device.name))}.jsonl"
        self._made_with = made_with()
        self.newest: dict[str, Any] = {row["key"]: row["plan"] for row in record.rows_of(self.path)
                                       if row["made_with"] == self._made_with}

    def add(self, key: str, plan: Mapping[str, Any]) -> None:
        self.newest[key] = plan
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, {"key": key, "made_with": self._made_with, "plan": plan})


def made_with() -> str:
    """What a plan depends on besides the recipe and the card."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(tightfit.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    versions = ((version_of(name) or "").partition("+")[0] for name in ("torch", "transformers"))
    return " ".join([*versions, digest.hexdigest()])


def card_name(name: str) -> str:
    """The catalogue's name of a card, whatever its driver calls it; its own where the catalogue lacks it."""
    try:
        return find_device(name).name
    except RecipeError:
        return name
