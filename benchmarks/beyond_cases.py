"""The cases of `beyond_gpu.py`, and their plans: what a model larger than the memory it is given is measured at."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import beyond
import tightfit
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.calibration import Calibration
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import estimate
from tightfit.planning.standard_tools import standard_tools
from tightfit.recipe import Recipe

Row = dict[str, Any]
STREAMED = {**beyond.RESIDENT, **beyond.STREAMED}
SHORT = {"model_overrides": {"num_hidden_layers": 3}, "precision": {"name": "bf16-pure", "rounding": "kahan"},
         "batch_size": 3, "seq_len": 1024, "max_grad_norm": 0.5, "deterministic": True}
LONG = {"trainable": "lora", "base": "nf4", "precision": "bf16", "seq_len": 65536, "checkpointing": "tiled-mlp",
        "expandable_segments": True}
TINY = {"model": "llama-3.2-1b", "vocab_size": 512, "seq_len": 64, "model_overrides": {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "tie_word_embeddings": False}}


@dataclass(frozen=True)
class Run:
    """One measurement. sequences: of a global batch. gib: what the allocator may reserve; None for all there is.
    exact: tell losses and weights instead of times. in_turn: nothing is copied while the device computes."""

    name: str
    sequences: int
    gib: float | None = None
    exact: bool = False
    in_turn: bool = False


@dataclass(frozen=True)
class Case:
    """A build, as changes of `beyond.PINNED`, and what is measured of it, one after the other in one process: what
    waits in host memory is made once. planned: host memory that a plan for the first run's `gib` has, which fills in
    what the fields leave open. recorded: whether what the allocator does is kept, in results/allocator_recordings/."""

    fields: Mapping[str, Any]
    runs: tuple[Run, ...]
    planned: str | None = None
    recorded: bool = False
    seconds: float = field(default=400.0, kw_only=True)


CASES = (
    Case({**beyond.RESIDENT, **SHORT}, (Run("exact: resident", 3, exact=True),)),
    Case({**beyond.RESIDENT, **SHORT}, (Run("exact: resident again", 3, exact=True),)),
    Case({**STREAMED, **SHORT}, (Run("exact: streamed", 3, exact=True),)),
    Case(beyond.RESIDENT, (Run("8B resident, 32k tokens", 8),)),
    Case({**STREAMED, **SHORT}, (Run("3 blocks streamed", 3),), recorded=True),
    Case(STREAMED, (
        Run("8B in 16 GiB, 32k tokens", 8, 16), Run("8B in 12 GiB, 64k tokens", 16, 12),
        Run("8B in 16 GiB, 128k tokens", 32, 16),
    )),
    Case({}, (Run("8B as planned, bf16, 128k tokens", 32),), planned="100GiB"),
    Case({"precision": {"name": "fp8", "weights": "bf16", "rounding": "stochastic"}},
         (Run("8B as planned, fp8, 128k tokens", 32),), planned="100GiB"),
    Case({**STREAMED, **LONG}, (Run("8B with adapters in 16 GiB, one sequence of 64k tokens", 1, 16),)),
    Case(beyond.EXTREMES[1][2], (Run("32B as planned, 32k tokens", 8),), planned="110GiB"),
    Case({}, (Run("8B as planned for 24 GiB, 32k tokens", 8, 24),), planned="100GiB"),
    Case(STREAMED, (Run("8B in 16 GiB, 32k tokens, copies in turn", 8, 16, in_turn=True),)),
)  # fmt: skip
"""What tells most comes first."""


def dry_cases() -> Iterator[Case]:
    """Tiny ones, that any machine runs in seconds."""
    for case in CASES:
        if case.planned is None:
            runs = tuple(replace(run, sequences=min(run.sequences, 4)) for run in case.runs)
            yield Case({**case.fields, **TINY}, runs)


def recipe_of(case: Case, run: Run, device: Device) -> Recipe:
    """The recipe of a case's run, resolved. Raises Refused where no plan fits."""
    values = {**beyond.PINNED, "pretrained": False, **case.fields, "batch_size": run.sequences}
    if case.planned is None:
        return resolve(Recipe.from_dict(values), device)
    chosen = tightfit.plan(values["model"], values, gpu=device.name, host_memory=case.planned,
                           gpu_memory=f"{run.gib}GiB" if run.gib else None).chosen
    if chosen is None:
        raise Refused(f"{run.name}: no plan fits")
    return chosen.recipe


def planned(case: Case, run: Run, device: Device, calibration: Calibration | None) -> Row:
    """A run's recipe and what is predicted of it."""
    began = time.monotonic()
    recipe = recipe_of(case, run, device)
    told = estimate(PytorchBackend().predict(recipe, device), recipe, device,
                    standard_tools(PytorchBackend(), calibration))
    return {"recipe": recipe.to_dict(), "tokens": recipe.batch_size * recipe.seq_len, "predicted": {
        "step_seconds": told.time.step_seconds, "mfu": told.time.mfu, "peak_allocated": told.memory.peak_allocated,
        "peak_reserved": told.memory.peak_reserved, "host": sum(told.memory.host_by_category.values()),
        "seconds": round(time.monotonic() - began, 1),
    }}  # fmt: skip


def key_of(case: Case, run: Run) -> str:
    """What a plan made before is found by."""
    return json.dumps([run.name, run.sequences, run.gib, case.planned, {**beyond.PINNED, **case.fields}])
