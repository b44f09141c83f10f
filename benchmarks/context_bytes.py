"""What the CUDA context and the kernels loaded into it take of a device, outside PyTorch's allocator.

Each figure is from a process of its own: after nothing but the context, one tensor, a matrix product of each format
(with a bias, and with a backward pass, too), a training step of a tiny model, and one that is compiled. Beside it, what
the allocator holds once all tensors are gone: cuBLAS's workspaces, against what is planned for them.

Nothing else may use the device meanwhile. Written to results/context_bytes-GPU.json; the figures of a training step
also to the record that comes with the package, which plans read (`--no-keep` leaves it alone).
Run: python benchmarks/context_bytes.py   (needs a CUDA device; about a minute)
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

from plan_vs_gpu import cuda_unopened

with cuda_unopened():
    import torch

    import gpu_truth
    import record
    import tightfit
    from forking import Job, run_forked
    from gpu_predictions import device_of
    from gpu_runs import on_gpu
    from tightfit.backends.pytorch.simulate.untraced import CONTEXT_RECORDS, workspace_bytes
    from tightfit.devices import MIB, Device
    from tightfit.errors import Refused

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


def observe(stage: str) -> dict[str, int]:
    """Run a stage in this process, the first thing that it does on the device. Bytes outside the allocator, in it, and
    of it in use once the stage's own tensors are gone."""
    before = gpu_truth.used_bytes()
    STAGES[stage]()
    gc.collect()
    found = gpu_truth.context_bytes(before)
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"outside": found["context"], "reserved": reserved, "held": held}


def keep(gpu: str, figures: dict[str, Any], path: Path = CONTEXT_RECORDS) -> Path:
    """Add a GPU's figures to the record that comes with the package."""
    path.write_text(json.dumps({**json.loads(path.read_text()), gpu: figures}, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-keep", action="store_true", help="leave the package's record as it is")
    arguments = parser.parse_args()
    try:
        facts = on_gpu()
    except Refused as reason:
        print(f"context_bytes: {reason}", file=sys.stderr)
        return 2
    device = device_of(facts)
    planned, stages = planned_workspaces(device), dict[str, Any]()
    for outcome in run_forked(Job(stage, partial(observe, stage), SECONDS) for stage in STAGES):
        stage = outcome.name
        if outcome.failure is not None:
            stages[stage] = {"failure": outcome.failure}
            print(f"{stage:22} FAILED: {outcome.failure}", flush=True)
            continue
        found = stages[stage] = {**outcome.value, "planned_workspaces": planned.get(stage)}
        held = f", workspaces {found['held']:,} held, {planned[stage]:,} planned" if stage in planned else ""
        print(f"{stage:22} {found['outside'] / MIB:7.1f} MiB outside the allocator{held}", flush=True)
    origin = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "driver": facts["driver"]}
    name = f"context_bytes-{record.slug(device.name)}"
    print(record.write(name, {"gpu": device.name, **origin, "stages": stages}))
    if any("failure" in found for found in stages.values()):
        return 1
    if not arguments.no_keep:
        print(keep(device.name, {**origin, **{stage: stages[stage]["outside"] for stage in ("step", "compiled")}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
