"""Full fine-tuning of a model larger than the card, planned: device and host memory, traffic, and speed by the tokens
of a global batch, until copies are hidden. Beside it what the card would do with room for everything: the same step
with all of it resident, and the fastest plan there is.

    python benchmarks/beyond.py            # writes results/beyond.json; no GPU is needed
    python benchmarks/beyond.py extremes   # writes results/beyond_extremes.json: the plans of cards far too small
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

import record
import tightfit
from tightfit.backends import load_backend
from tightfit.devices import GIB, Device, find_device
from tightfit.display.words import as_written
from tightfit.planning.costs import Estimate, FitRank
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.copies import HIDDEN_SPEED, Copies
from tightfit.recipe import Recipe

MODEL, OPTIMIZER, SEQUENCE = "llama-3.1-8b", "adamw", 4096
PINNED: dict[str, Any] = {
    "model": MODEL, "optimizer": OPTIMIZER, "precision": {"name": "bf16-pure", "rounding": "stochastic"},
    "seq_len": SEQUENCE, "data": {"source": "dummy", "eval_fraction": 0},
}
RESIDENT: dict[str, Any] = {
    "attention": "sdpa", "compile": "off", "loss": "chunked", "checkpointing": "every-block", "micro_batch_size": 1,
}
STREAMED: dict[str, Any] = {
    "accumulation": "by-block", "update": "with-forward", "offload": {"name": "host", "activations": 1},
}
CARDS = ("h200", "rtx-4090", "rtx-5060-ti-16gb", "rtx-3060")
SEQUENCES = (1, 2, 4, 8, 16)
"""Of a global batch, of each card; twice as many, and twice as many again, up to one that hides copies."""
ROOM = 1 << 40
"""Bytes of memory for a card that has room for everything."""


class Card:
    """Predictions of one card. fastest: the fastest plan with everything resident, of a global batch of the most of
    SEQUENCES."""

    def __init__(self, name: str) -> None:
        self.device = find_device(name)
        self._backend = load_backend("pytorch")
        self._tools = standard_tools(self._backend)
        asked = {**PINNED, "batch_size": SEQUENCES[-1], "offload": "none"}
        chosen = tightfit.plan(MODEL, asked, gpu=name, gpu_memory=f"{ROOM // GIB}GiB").chosen
        assert chosen is not None, "there is room for everything"
        self.fastest = chosen
        self._streamed: dict[int, tuple[Estimate, float]] = {}

    def predict(self, recipe: Recipe, device: Device | None = None) -> Estimate:
        device = device or self.device
        resolved = resolve(recipe, device)
        return estimate(self._backend.predict(resolved, device), resolved, device, self._tools)

    def streamed(self, sequences: int) -> tuple[Estimate, Copies, float]:
        """The streamed step, its copies, and the seconds that predicting it took."""
        if sequences not in self._streamed:
            begun = time.perf_counter()
            found = self.predict(Recipe.from_dict({**PINNED, **RESIDENT, **STREAMED, "batch_size": sequences}))
            self._streamed[sequences] = found, time.perf_counter() - begun
        found, seconds = self._streamed[sequences]
        assert found.time.copies is not None
        return found, found.time.copies, seconds

    def resident(self, sequences: int) -> Estimate:
        """The same recomputation with everything on the card."""
        return self.predict(Recipe.from_dict({**PINNED, **RESIDENT, "batch_size": sequences}),
                            replace(self.device, memory_bytes=ROOM))


def row(card: Card, sequences: int) -> dict[str, Any]:
    """A card at one global batch."""
    found, copies, seconds = card.streamed(sequences)
    memory, speed = found.memory, found.time.tokens_per_second
    return {
        "gpu": card.device.name, "tokens": sequences * SEQUENCE, "fits": memory.verdict,
        "reserved_gib": round(memory.peak_reserved / GIB, 2),
        "host_gib": round(sum(memory.host_by_category.values()) / GIB, 1),
        "host_by_category_gib": {name: round(held / GIB, 1) for name, held in memory.host_by_category.items() if held},
        "to_device_gib": round(copies.bytes_in / GIB, 1), "to_host_gib": round(copies.bytes_out / GIB, 1),
        "copying_seconds": round(copies.seconds_in + copies.seconds_out, 2),
        "added_seconds": round(copies.added, 3), "of_speed_without_copies": round(copies.speed, 3),
        "hidden_from_tokens": copies.hidden_from and copies.hidden_from * SEQUENCE,
        "tokens_per_second": round(speed), "mfu": round(found.time.mfu, 3),
        "of_resident_speed": round(speed / card.resident(sequences).time.tokens_per_second, 3),
        "of_fastest_speed": round(speed / card.fastest.estimate.time.tokens_per_second, 3),
        "trace_seconds": round(seconds, 1),
    }  # fmt: skip


def hidden_from(card: Card) -> int:
    """Sequences of the smallest global batch that hides copies, predicted itself, as is the one below it."""

    def hides(sequences: int) -> bool:
        return card.streamed(sequences)[1].speed >= HIDDEN_SPEED

    above = next((each for each in SEQUENCES if hides(each)), None)
    below = max((each for each in SEQUENCES if above is None or each < above), default=0)
    guess = card.streamed(below)[1].hidden_from if below else None
    sequences = max(guess or below + 1, below + 1) if above is None else min(guess or above, above)
    while not hides(sequences):
        sequences += 1
    while sequences > below + 1 and hides(sequences - 1):
        sequences -= 1
    return sequences


EXTREMES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("rtx-4060-ti-8gb", "128GB", {"model": MODEL, "optimizer": OPTIMIZER}),
    ("h200", "128GB", {"model": "qwen2.5-32b", "optimizer": "adamw-8bit"}),
)
"""Card, host memory, and the model with its optimizer."""


def extremes() -> None:
    """The plans of models that take many times the card."""
    rows = []
    for gpu, host, fields in EXTREMES:
        begun = time.perf_counter()
        asked = {**PINNED, "attention": "sdpa", "compile": "off", "batch_size": 8, **fields}
        chosen = tightfit.plan(fields["model"], asked, gpu=gpu, host_memory=host).chosen
        assert chosen is not None
        memory = chosen.estimate.memory
        rows.append({
            "gpu": find_device(gpu).name, "host_memory": host, "asked": fields, "recipe": chosen.recipe.to_dict(),
            "fits": chosen.estimate.memory.verdict, "driver_gib": round(memory.needed / GIB, 2),
            "allocated_gib": round(memory.peak_allocated / GIB, 2),
            "host_gib": round(sum(memory.host_by_category.values()) / GIB, 1),
            "tokens_per_second": round(chosen.estimate.time.tokens_per_second),
            "seconds": round(time.perf_counter() - begun, 1),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    print(record.write("beyond_extremes", {"tokens": 8 * SEQUENCE, "rows": rows}))


def main() -> None:
    cards, kept = [], []
    for name in CARDS:
        card = Card(name)
        free = hidden_from(card)
        fits = all(card.streamed(each)[0].fit_rank is FitRank.SAFE for each in SEQUENCES)
        doubled = takewhile(free.__gt__, (SEQUENCES[-1] << power for power in count()))
        best = card.fastest.estimate
        cards.append({
            "gpu": card.device.name, "memory_gib": round(card.device.memory_bytes / GIB, 1), "fits": fits,
            "hidden_from_tokens": free * SEQUENCE if fits else None, "fastest": as_written(card.fastest.recipe),
            "fastest_gib": round(best.memory.used / GIB, 1),
            "fastest_tokens_per_second": round(best.time.tokens_per_second),
        })  # fmt: skip
        kept += [row(card, each) for each in sorted({*SEQUENCES, *doubled, free})]
        print(json.dumps(cards[-1]), flush=True)
        # After each card: a run takes half an hour.
        written = record.write("beyond", {"model": MODEL, "optimizer": OPTIMIZER, "share": HIDDEN_SPEED, "cards": cards,
                                          "rows": kept})
    print(written)


if __name__ == "__main__":
    extremes() if sys.argv[1:] == ["extremes"] else main()
