"""The simulated caching allocator against the real one, block by block, on a CUDA device.

Each run has a process of its own, which records what the allocator does from its first allocation on: training steps of
a few recipes, and random allocations under a limit that makes it release, retry and fail. The simulation must put every
block where it really lay, and reserve as much. Recordings go to results/allocator_recordings/, what they come to to
results/allocator_recordings-GPU.json.

Run: python benchmarks/allocator_snapshots.py
     python benchmarks/allocator_snapshots.py --again    compare what is recorded, with no GPU
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from plan_vs_gpu import cuda_unopened

with cuda_unopened():
    import torch

    import gpu_truth
    import record
    from allocator_recordings import compare, read_recording, recording_of, write_recording
    from forking import Job, run_forked
    from gpu_cases import SMALL_GPT, Aim, Case, write_configurations
    from gpu_predictions import device_of
    from gpu_runs import on_gpu
    from tightfit.devices import MIB, Device
    from tightfit.errors import Refused

LINES = (
    f"gpt2 32x512 {SMALL_GPT}", "gpt2 8x1024*2.5 attention=eager", "gpt2 16x1024", "gpt2-xl 4x1024",
    "gpt2-large 8x1024", "gpt2-medium 16x1024 checkpointing=every-nth checkpointing.n=3",
    "gpt2-medium 16x1024 checkpointing=segments", "bert-large 16x384*3.25", "llama-3.2-1b 2x2048*8",
)
"""Recipes, as `gpu_cases` has them; those that were taken apart first."""
EXPANDABLE = "gpt2 16x1024"
"""The one that is recorded with expandable segments."""
RANDOM, RANDOM_LIMIT, RANDOM_EVENTS = "random", 1024 * MIB, 8000
SECONDS = 60
"""A run that takes longer is given up."""


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


def observe(name: str, case: Case | None, configurations: Path, device: Device, path: Path) -> None:
    """Record a case's steps in this process, or without a case random allocations."""
    expandable, limit = case is not None and case.expandable, None if case is not None else RANDOM_LIMIT
    gpu_truth._set_up(limit, expandable)
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    if case is None:
        allocate(0)
    else:
        gpu_truth.TIMED_SECONDS = 0.01
        gpu_truth._run(case.recipe(configurations), device, gpu_truth.Meter(cuda=True))
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    origin = {"run": name, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    write_recording(path, recording_of(
        torch.cuda.memory._snapshot(), origin=origin,
        limit=limit and int(limit / total * total),  # as the allocator computes it
        statistics=torch.cuda.memory_stats() if case is None else None,  # the meter starts a case's peaks anew
    ))


def examine(paths: Iterable[Path], gpu: str) -> bool:
    """Compare recordings and write what they come to. Whether all are exact."""
    runs: dict[str, Any] = {}
    for path in paths:
        recording = read_recording(path)
        found = compare(recording)
        name = recording.origin["run"] + (", expandable segments" if recording.expandable else "")
        runs[name] = {"file": path.name, "torch": recording.origin.get("torch"), "events": len(recording.events),
                      "allocations": found.allocations, "moved": found.moved, "off": found.off,
                      "peak_reserved": found.peak_reserved, "exact": found.exact,
                      "first_difference": found.first_difference}
        real, simulated = (size / MIB for size in found.peak_reserved)
        print(f"{name:80} {found.allocations:7} allocations, {found.moved} elsewhere; reserved {real:,.0f} MiB, "
              f"{simulated:,.0f} simulated", flush=True)
    print(record.write(f"allocator_recordings-{record.slug(gpu)}", {"gpu": gpu, "runs": runs}))
    return all(run["exact"] for run in runs.values())


def main() -> int:
    """The exit status: 0; 1 where a run is not exact; 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="compare what is recorded; needs no GPU")
    folder = record.RESULTS / "allocator_recordings"
    if parser.parse_args().again:
        of_gpu: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("*.json.gz")):
            of_gpu.setdefault(read_recording(path).origin["device"], []).append(path)
        exact = {gpu: examine(paths, gpu) for gpu, paths in of_gpu.items()}
        return 0 if all(exact.values()) else 1
    try:
        device = device_of(on_gpu())
    except Refused as reason:
        print(f"allocator_snapshots: {reason}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    cases: list[tuple[str, Case | None]] = [(line, Case("snapshot", line, Aim("fill", 100))) for line in LINES]
    cases += [(EXPANDABLE, Case("snapshot", EXPANDABLE, Aim("fill", 100), expandable=True)), (RANDOM, None)]
    paths, failed = [], False
    with tempfile.TemporaryDirectory() as name:
        write_configurations(Path(name))
        for line, case in cases:
            words = f"{record.slug(device.name)} {line}" + (" expandable" if case and case.expandable else "")
            path = folder / f"{re.sub('[^a-z0-9]+', '-', words.lower())}.json.gz"
            job = Job(line, partial(observe, line, case, Path(name), device, path), SECONDS)
            outcome = next(run_forked([job]))
            if outcome.failure is None:
                paths.append(path)
            else:
                failed = True
                print(f"{line}: FAILED: {outcome.failure}", flush=True)
    return 0 if examine(paths, device.name) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
