"""A 70B model on 1 to 1,024 H100s, planned: memory, speed and what binds, by the number of GPUs and the network.

    python benchmarks/scale.py             # writes results/scale.json; no GPU is needed

A global batch has the same tokens on any number of GPUs. On each number the fastest is taken of some steps, whole in
GPU memory where they fit, else with FSDP's parts in the hosts' memory, and on one GPU block by block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import record
from tightfit.backends import load_backend
from tightfit.devices import Device, find_device
from tightfit.planning.cluster import Cluster, parse_network
from tightfit.planning.defaults import resolve
from tightfit.planning.search.evaluate import Evaluated, InProcess
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.uncertainty import Work
from tightfit.recipe import Recipe

MODEL, GPU, SEQUENCE, SEQUENCES = "llama-3.1-70b", "h100-sxm", 4096, 1024
PINNED: dict[str, Any] = {
    "model": MODEL, "seq_len": SEQUENCE, "batch_size": SEQUENCES, "precision": "bf16", "optimizer": "adamw",
    "attention": "sdpa", "loss": "chunked", "checkpointing": "every-block", "compile": "off", "offload": "none",
    "data": {"source": "dummy", "eval_fraction": 0},
}
BY_BLOCK: dict[str, Any] = {
    "precision": {"name": "bf16-pure", "rounding": "stochastic"}, "accumulation": {"name": "by-block", "sweep": 4},
    "update": "with-forward", "micro_batch_size": 4,
    "offload": {"name": "host", "weights": 1, "gradients": 1, "optimizer": 1, "activations": 1},
}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
IN_MACHINE = 8
NETWORKS = ("8x400Gbit", "100Gbit")
"""Of a machine: a network card for each GPU, and a single slower one."""
MICRO_BATCHES = (4, 2, 1)
PARAMETERS, STATES = 70_553_706_496, 16
"""Of the model, and bytes of weights, gradients and AdamW's states in fp32 for each: what cannot fit is not traced."""


def steps(gpus: int) -> Iterator[dict[str, Any]]:
    """The steps to try on so many GPUs, until one fits: with everything in GPU memory, the largest micro-batch first,
    then with parts in the host's."""
    if gpus == 1:
        yield BY_BLOCK
        return
    whole = STATES * PARAMETERS / gpus < find_device(GPU).memory_bytes
    for parts in ({}, {"cpu_offload": True}) if whole else ({"cpu_offload": True},):
        for micro in MICRO_BATCHES:
            if micro * gpus <= SEQUENCES:
                yield {"micro_batch_size": micro, "parallel": {"name": "fsdp", "processes": gpus, **parts}}


def measure() -> dict[str, Any]:
    """The record."""
    tools = standard_tools(load_backend("pytorch"))
    rows: list[dict[str, Any]] = []
    for gpus in COUNTS:
        evaluator = InProcess(tools)  # traces are large, and each number of GPUs has its own
        begun = time.process_time()
        for network in NETWORKS if gpus > IN_MACHINE else NETWORKS[:1]:
            device = on(gpus, network)
            found = fastest(gpus, device, evaluator)
            rows.append({"network": network if gpus > IN_MACHINE else None, **row(found, device),
                         "processor_seconds": round(time.process_time() - begun, 1)})  # fmt: skip
            print(rows[-1], flush=True)
    return {"model": MODEL, "gpu": find_device(GPU).name, "seq_len": SEQUENCE, "tokens": SEQUENCE * SEQUENCES,
            "gpus_a_machine": IN_MACHINE, "rows": rows}  # fmt: skip


def on(gpus: int, network: str) -> Device:
    """One of so many GPUs."""
    machines = -(-gpus // IN_MACHINE)
    cluster = Cluster(cards=min(gpus, IN_MACHINE), machines=machines, network=parse_network(network))
    return cluster.on(find_device(GPU))


def fastest(gpus: int, device: Device, evaluator: InProcess) -> Evaluated:
    """The first of the steps that fits with the margin to spare: larger micro-batches communicate less."""
    for changes in steps(gpus):
        recipe = resolve(Recipe.from_dict({**PINNED, **changes}), device)
        outcome = evaluator.one(recipe, device)
        if not isinstance(outcome, Evaluated):
            raise outcome
        if outcome.fit_rank.is_safe:
            return outcome
    raise AssertionError("parts in host memory fit any of them")


def row(found: Evaluated, device: Device) -> dict[str, Any]:
    """A line of the record."""
    memory, spent, recipe = found.estimate.memory, found.estimate.time, found.recipe
    moved = spent.communication
    return {
        "gpus": device.world, "nodes": device.machines, "micro_batch_size": recipe.micro_batch_size,
        "parallel": recipe.to_dict()["parallel"], "gpu_bytes": memory.used,
        "host_bytes_of_a_machine": device.cards * memory.host if memory.host_by_category else 0,
        "step_seconds": spent.step_seconds, "tokens_per_second": spent.tokens_per_second,
        "per_gpu": spent.tokens_per_second / device.world, "mfu": spent.mfu,
        "waits": {work.name.lower(): spent.work.get(work, 0.0) / spent.step_seconds
                  for work in (Work.COMMUNICATION, Work.HOST, Work.TRANSFERS)},
        "communication": None if moved is None else moved.to_json(),
    }  # fmt: skip


if __name__ == "__main__":
    record.write("scale", measure())
