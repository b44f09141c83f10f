"""Full fine-tuning of models larger than the card, planned: device and host memory, traffic, and speed by the tokens of
a global batch, beside the same step with everything resident on a card that had the room.

    python benchmarks/beyond.py            # writes results/beyond.json; no GPU is needed
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.backends import load_backend
from tightfit.devices import GIB, find_device
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe
from tightfit.trace import COPIES, Place, Stream

RESULTS = Path(__file__).parents[1] / "results" / "beyond.json"
SEQUENCE = 4096
COMMON: dict[str, Any] = {
    "precision": {"name": "bf16-pure", "rounding": "stochastic"}, "attention": "sdpa", "compile": "off",
    "loss": "chunked", "checkpointing": "every-block", "seq_len": SEQUENCE, "micro_batch_size": 1,
    "data": {"source": "dummy", "eval_fraction": 0},
}
STREAMED: dict[str, Any] = {
    "accumulation": "by-block", "update": "with-forward", "offload": {"name": "host", "activations": 1},
}
CASES = (
    ("llama-3.1-8b", "h200", "adamw"), ("llama-3.1-8b", "rtx-4090", "adamw"),
    ("llama-3.1-8b", "rtx-5060-ti-16gb", "adamw"), ("llama-3.1-8b", "rtx-3060", "adamw"),
)
SEQUENCES = (2, 4, 8, 16)
"""Of a global batch: 8k to 64k tokens."""


def rows() -> Iterator[dict[str, Any]]:
    """Each case at each global batch."""
    backend = load_backend("pytorch")
    tools = standard_tools(backend)
    for model, gpu, optimizer in CASES:
        device = find_device(gpu)
        for sequences in SEQUENCES:
            fields = {**COMMON, "model": model, "optimizer": optimizer, "batch_size": sequences}
            streamed = resolve(Recipe.from_dict({**fields, **STREAMED}), device)
            begun = time.perf_counter()
            trace = backend.predict(streamed, device)
            seconds = time.perf_counter() - begun
            found = estimate(trace, streamed, device, tools)
            resident = resolve(Recipe.from_dict(fields), device)
            whole = estimate(backend.predict(resident, device), resident, replace(device, memory_bytes=1 << 40), tools)
            moved = {stream: sum(op.bytes_read * n for op, n in trace.step_ops() if op.stream is stream)
                     for stream in COPIES}
            yield {
                "model": model, "gpu": device.name, "optimizer": optimizer, "tokens": sequences * SEQUENCE,
                "fits": found.fits, "reserved_gib": round(found.memory.peak_reserved / GIB, 2),
                "host_gib": round(trace.peak(place=Place.HOST)[1] / GIB, 1),
                "to_device_gib": round(moved[Stream.COPY_IN] / GIB, 1),
                "to_host_gib": round(moved[Stream.COPY_OUT] / GIB, 1),
                "tokens_per_second": round(found.time.tokens_per_second), "mfu": round(found.time.mfu, 3),
                "resident_gib": round(whole.memory.peak_reserved / GIB, 1),
                "of_resident_speed": round(found.time.tokens_per_second / whole.time.tokens_per_second, 3),
                "trace_seconds": round(seconds, 1),
            }


def main() -> None:
    found = []
    for row in rows():
        print(json.dumps(row), flush=True)
        found.append(row)
        RESULTS.write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
