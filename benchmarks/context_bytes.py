"""What the CUDA context and the kernels loaded into it take of a device, outside PyTorch's allocator.

Each figure is from a process of its own: after nothing but the context, one tensor, a matrix product of each format
(with a bias, and with a backward pass, too), a training step of a tiny model, and one that is compiled. Beside it, what
the allocator holds once all tensors are gone: cuBLAS's workspaces, against what is planned for them.

Nothing else may use the device meanwhile. Written to results/context_bytes.json; the figures of a training step also
to the machine's own record, which plans read from then on (`--no-keep` leaves it alone).
Run: python benchmarks/context_bytes.py   (needs a CUDA device; about three minutes)
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import record
import tightfit
from gpu_truth import used_bytes
from tightfit.backends.pytorch.simulate.untraced import RECORDS, workspace_bytes
from tightfit.devices import MIB, Device
from tightfit.nvml import driver_version

SECONDS = 150
"""A process that takes longer is given up."""
TINY: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 128},
    "vocab_size": 1024, "seq_len": 128, "data": {"source": "dummy", "samples": 64}, "batch_size": 8,
    "micro_batch_size": 4, "max_steps": 3, "eval_samples": 4, "precision": "bf16", "checkpointing": "none",
    "optimizer": "adamw", "attention": "sdpa", "loading": {"workers": 0},
}  # fmt: skip


def multiply(dtype: torch.dtype, *, bias: bool = False, backward: bool = False) -> None:
    """A matrix product on the device, and what goes with it."""
    left, right = (torch.ones(512, 512, dtype=dtype, device="cuda", requires_grad=backward) for _ in range(2))
    product = torch.addmm(torch.ones(512, dtype=dtype, device="cuda"), left, right) if bias else left @ right
    if backward:
        product.sum().backward()


def train(compiled: str) -> None:
    """Three steps of a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        values = {**TINY, "compile": compiled, "output_dir": f"{folder}/run", "cache_dir": f"{folder}/cache"}
        if tightfit.Trainer(recipe=values).train().stopped_by:
            sys.exit(1)


STAGES: dict[str, Callable[[], object]] = {
    "nothing": torch.cuda.mem_get_info,
    "tensor": partial(torch.ones, 1, device="cuda"),
    "float32 product": partial(multiply, torch.float32),
    "float16 product": partial(multiply, torch.float16),
    "bfloat16 product": partial(multiply, torch.bfloat16),
    "product with a bias": partial(multiply, torch.bfloat16, bias=True),
    "product and backward": partial(multiply, torch.bfloat16, backward=True),
    "step": partial(train, "off"),
    "compiled": partial(train, "per-block"),
}


def planned_workspaces(device: Device) -> dict[str, int]:
    """Bytes that are planned for cuBLAS's workspaces, by stage."""
    own = workspace_bytes(device)
    one = {f"{dtype} product": own for dtype in ("float32", "float16", "bfloat16")}
    return {**one, "product with a bias": own, "product and backward": 2 * own}


def observe(stage: str, uuid: str) -> dict[str, int]:
    """Run a stage in this process, the first thing that it does on the device. Bytes outside the allocator, in it, and
    of it in use once the stage's own tensors are gone. Where the driver cannot be asked, other processes count."""
    before = used_bytes(uuid)
    STAGES[stage]()
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    after = used_bytes(uuid)
    taken = total - free if before is None or after is None else after - before
    reserved = torch.cuda.memory_reserved()
    return {"outside": taken - reserved, "reserved": reserved, "held": torch.cuda.memory_allocated()}


def observe_apart(stage: str, uuid: str) -> dict[str, Any]:
    """The same in a new process; `failure` tells why there are no figures."""
    printed, failure = record.apart(__file__, "--stage", stage, "--uuid", uuid, seconds=SECONDS)
    found: dict[str, Any] = {"failure": failure} if failure else json.loads(printed.splitlines()[-1])
    return found


def keep(gpu: str, figures: dict[str, Any], path: Path = RECORDS[0]) -> Path:
    """Add a GPU's figures to the machine's own record."""
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = {}
    path.write_text(json.dumps({**kept, gpu: figures}, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, help="do this in this process, and print its figures")
    parser.add_argument("--uuid", default="", help="of the device, with --stage")
    parser.add_argument("--no-keep", action="store_true", help="leave the machine's own record as it is")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"context_bytes: torch {torch.__version__} finds no CUDA device here; run it on a machine with a GPU",
              file=sys.stderr)
        return 2
    if arguments.stage:
        print(json.dumps(observe(arguments.stage, arguments.uuid)))
        return 0
    properties = torch.cuda.get_device_properties(0)
    device = Device(kind="cuda", name=properties.name, memory_bytes=properties.total_memory,
                    capability=(properties.major, properties.minor), units=properties.multi_processor_count)
    uuid = f"GPU-{str(properties.uuid).removeprefix('GPU-')}"  # which this process may ask CUDA for, and a stage's not
    planned, stages = planned_workspaces(device), {}
    for stage in STAGES:
        found = stages[stage] = {**observe_apart(stage, uuid), "planned_workspaces": planned.get(stage)}
        if "failure" in found:
            print(f"{stage:22} FAILED: {found['failure']}", flush=True)
            continue
        held = f", workspaces {found['held']:,} held, {planned[stage]:,} planned" if stage in planned else ""
        print(f"{stage:22} {found['outside'] / MIB:7.1f} MiB outside the allocator{held}", flush=True)
    origin = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__,
              "driver": driver_version() or "unknown"}
    print(record.write("context_bytes", {"gpu": device.name, **origin, "stages": stages}))
    if any("failure" in found for found in stages.values()):
        return 1
    if not arguments.no_keep:
        print(keep(device.name, {**origin, **{stage: stages[stage]["outside"] for stage in ("step", "compiled")}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
