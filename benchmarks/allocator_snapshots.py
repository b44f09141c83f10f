"""The simulated caching allocator against the real one, block by block, on a CUDA device.

Each run has a process of its own, which records what the allocator does from its first allocation on: training runs,
and random allocations under a limit that makes it release, retry and fail; all with both kinds of segments. The
simulation must put every block where it really lay, and reserve as much. A training run
is repeated with less memory than it reserved, between what it needs and what it took.
Run: python benchmarks/allocator_snapshots.py --output FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import record
import tightfit
from allocator_recordings import Recording, compare, read_recording, recording_of, write_recording
from tightfit.devices import MIB
from tightfit.errors import OutOfMemory

SECONDS = 380
"""No run begins after so many seconds."""
RUN_SECONDS = 90
"""A run that takes longer is given up."""
SEGMENTS = {"segments": "expandable_segments:False", "expandable": "expandable_segments:True"}
COMMON: dict[str, Any] = {
    "model": "gpt2",
    "model_overrides": {"n_layer": 4, "n_head": 12, "n_embd": 768, "n_positions": 512},
    "vocab_size": 4096, "seq_len": 512, "data": {"source": "dummy", "samples": 64}, "batch_size": 12,
    "micro_batch_size": 4, "max_steps": 3, "eval_samples": 4, "precision": "bf16", "checkpointing": "none",
    "optimizer": "adamw", "attention": "sdpa", "compile": "off",
}
TRAINING: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "checkpointing": {"checkpointing": "every-block", "micro_batch_size": 12},
    "fp32 eager foreach": {"precision": "fp32", "attention": "eager",
                           "optimizer": {"name": "adamw", "implementation": "foreach"}},
    "padded rows": {"data": {"source": "stdlib", "packing": False}, "batch_size": 16, "max_steps": 6},
}
RANDOM = "random"
RANDOM_LIMIT = 1024 * MIB
RANDOM_EVENTS = 8000


def train(changes: dict[str, Any], folder: Path) -> None:
    """A training run of COMMON with `changes`."""
    values = {**COMMON, "output_dir": str(folder / "run"), "cache_dir": str(folder / "cache"), **changes}
    if tightfit.Trainer(recipe=values).train().stopped_by:
        sys.exit(1)


def allocate(seed: int) -> None:
    """Random sizes on two streams, dropped at random; what does not fit is left out."""
    random = torch.Generator().manual_seed(seed)

    def pick(below: int) -> int:
        return int(torch.randint(below, (), generator=random))

    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    live: list[torch.Tensor] = []
    for _ in range(RANDOM_EVENTS):
        if live and pick(100) < 48:
            del live[pick(len(live))]
            continue
        size = 1 + pick((4096, MIB, 4 * MIB, 12 * MIB, 30 * MIB, 100 * MIB)[pick(6)])
        with torch.cuda.stream(streams[pick(5) == 0]), contextlib.suppress(torch.OutOfMemoryError):
            live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def record_run(name: str, path: Path, limit: int | None) -> None:
    """Run one of TRAINING or RANDOM in this process, and write what the allocator did."""
    torch.cuda.init()
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        limit = int(limit / total * total)  # as the allocator computes it
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    outcome = "went well"
    with tempfile.TemporaryDirectory() as folder:
        try:
            allocate(0) if name == RANDOM else train(TRAINING[name], Path(folder))
        except OutOfMemory as error:
            outcome = str(error)
    torch.cuda.synchronize()
    write_recording(path, recording_of(
        torch.cuda.memory._snapshot(), limit=limit, statistics=torch.cuda.memory_stats(),
        origin={"run": name, "outcome": outcome, "settings": os.environ.get("PYTORCH_ALLOC_CONF", ""),
                "torch": torch.__version__, "device": torch.cuda.get_device_name()},
    ))


def run_apart(name: str, settings: str, path: Path, limit: int | None) -> str:
    """Have `record_run` done by a new process, with these settings. What it said, where it failed."""
    limited = [] if limit is None else ["--limit", str(limit)]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings}
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    return record.apart(__file__, "--record", name, "--output", str(path), *limited, seconds=RUN_SECONDS,
                        environment=environment)[1]


def examine(recording: Recording) -> dict[str, Any]:
    """The comparison, and the time that the simulation takes."""
    began = time.perf_counter()
    comparison = compare(recording)
    seconds = time.perf_counter() - began
    return {
        "origin": dict(recording.origin), "limit": recording.limit, "events": len(recording.events),
        **asdict(comparison), "exact": comparison.exact,
        "microseconds_an_event": seconds * 1e6 / len(recording.events),
    }


def measure(output: Path) -> dict[str, dict[str, Any]]:
    """Every run that there is time for, by its name."""
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}

    def one(label: str, name: str, settings: str, limit: int | None = None) -> Recording | None:
        if time.monotonic() - began > SECONDS:
            found[label] = {"exact": False, "failure": "no time was left"}
            return None
        path = output / f"{label.replace(', ', '-').replace(' ', '-')}.json.gz"
        failure = run_apart(name, settings, path, limit)
        if failure:
            found[label] = {"exact": False, "failure": failure}
            print(f"{label:42} FAILED: {failure}", flush=True)
            return None
        recording = read_recording(path)
        row = found[label] = examine(recording)
        print(f"{label:42} {row['events']:7} events  peak reserved {row['peak_reserved'][0] / MIB:8.0f} MiB real, "
              f"{row['peak_reserved'][1] / MIB:8.0f} simulated  {row['first_difference'] or 'exact'}", flush=True)
        return recording

    for kind, segments in SEGMENTS.items():
        one(f"{RANDOM}, {kind}", RANDOM, segments, RANDOM_LIMIT)
        for name in TRAINING:
            recording = one(f"{name}, {kind}", name, segments)
            if recording is not None and name in ("accumulation", "padded rows"):
                needed, reserved = (recording.statistics[f"peak_{what}"] for what in ("allocated", "reserved"))
                one(f"{name}, {kind}, less memory", name, segments, (needed + reserved) // 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the recordings, as compressed JSON")
    parser.add_argument("--record", choices=[*TRAINING, RANDOM], help="do this run here, and write it to --output")
    parser.add_argument("--limit", type=int, help="bytes that the allocator may reserve, with --record")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"allocator_snapshots: torch {torch.__version__} sees no CUDA device here", file=sys.stderr)
        sys.exit(2)
    if arguments.record:
        record_run(arguments.record, arguments.output, arguments.limit)
        return
    runs = measure(arguments.output)
    print(record.write("allocator_snapshots", {"runs": runs}))
    exact = [run["exact"] for run in runs.values()]
    print(f"{sum(exact)} of {len(exact)} runs exact")
    sys.exit(0 if all(exact) else 1)


if __name__ == "__main__":
    main()
