"""Pages made from what benchmarks recorded in results/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PEERS = {
    "tightfit": "tightfit", "accelerate": "accelerate estimate-memory", "deepspeed_zero2": "DeepSpeed ZeRO-2",
    "deepspeed_zero3": "DeepSpeed ZeRO-3",
}  # fmt: skip

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and rows."""


def recorded_pages() -> dict[str, list[str | Table]]:
    """The parts of each page whose record exists, paragraphs and tables, by the page's path below docs/."""
    made = {"rules_of_thumb": rules_page, "peer_estimates": peers_page}
    return {
        f"{name}.md": list(page(json.loads((RESULTS / f"{name}.json").read_text("utf-8"))))
        for name, page in made.items()
        if (RESULTS / f"{name}.json").exists()
    }


def rules_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """The rules of thumb, what is predicted, and why they differ."""
    small, large = record["bytes_per_parameter"], record["states_gb"]
    yield "# Rules of thumb"
    yield ("Guides state the memory of training in bytes per parameter. Here each rule stands beside what the training "
           "step itself holds, as planning predicts it: the most bytes of that kind at once in a step, over the number "
           "of parameters.")
    yield (f"A decoder of {small['parameters'] / 1e6:.0f} million parameters, sequences of 64 tokens, planned for the "
           f"{record['device']}; {_where(record, 'rules_of_thumb')}. Where nothing is said, the rule holds.")
    yield ("what", "rule", "predicted", "why"), [
        (row["what"], row["rule"], f"{row['predicted']:.3g}", row["why"]) for row in small["rows"]
    ]
    yield "## Optimizer states of a model of 3 billion parameters"
    yield f"In GB, for {large['parameters'] / 1e9:.2f} billion parameters."
    yield ("what", "rule", "predicted", "why"), [
        (row["what"].rpartition(", ")[2], row["rule"], f"{row['predicted']:.3g}", row["why"]) for row in large["rows"]
    ]


def peers_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """Other tools' estimates beside tightfit's, against measured memory."""
    yield "# Memory estimates beside those of other tools"
    yield ("How far each estimate is from the most that two real steps on the CPU hold at once, by torch.profiler's "
           "own allocation events. Small models, AdamW and fp32 where nothing is said; "
           f"{_where(record, 'peer_estimates')}.")
    rows = [
        (row["what"], row["batch"], f"{row['measured'] / 2**20:.1f}", *(_signed(row["error"][p]) for p in PEERS))
        for row in record["rows"]
    ]
    for figure in ("median", "worst"):
        rows.append((f"{figure}, without sign", "", "", *(f"{record['summary'][p][figure]:.2%}" for p in PEERS)))
    yield ("model", "sequences x tokens", "measured MiB", *PEERS.values()), rows
    yield "## How each figure was got"
    yield "- tightfit: the peak of the predicted trace, for the CPU."
    yield ("- accelerate: the functions behind `accelerate estimate-memory`, run on the same model on torch's meta "
           "device; its figure for training with Adam. It knows the weights' bytes and the precision, and says that it "
           "is for a batch size of 1. For mixed precision it names the largest of its parts, not their sum.")
    yield ("- DeepSpeed: not installed where this was recorded. Its published formulas for one GPU without offloading "
           "were computed, not run: 20 bytes a parameter for ZeRO-2; for ZeRO-3, 18 and 4 more for each parameter of "
           "the largest module. They are for mixed precision with Adam, and leave activations to the reader.")
    yield ("Neither of the others counts activations, and neither knows another optimizer than Adam: their distance "
           "grows with the batch. On a GPU this comparison is not yet measured.")


def _where(record: Mapping[str, Any], name: str) -> str:
    place = record["environment"]
    return f"torch {place['torch']}, {place['date']}, in [{name}.json](../results/{name}.json)"


def _signed(error: float) -> str:
    return f"{error:+.2%}" if round(error, 4) else "0.00%"
