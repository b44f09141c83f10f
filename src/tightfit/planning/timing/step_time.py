"""How long one optimizer step takes: the device's time for each op, and the host's for issuing it.

On a CUDA device two clocks run. The host issues kernels one after another, up to `QUEUE` ahead; the device runs them in
that order. Where the host falls behind, the device waits, and the step is bound by launches. A read of a value makes
the host wait for the device. On the CPU one clock runs: the host is the device.

Two steps are simulated in a row and the second is given, as a run in full swing has it. Of micro-batches that repeat,
three are simulated and the last one's time is taken for the rest.

| constant | figure | where it comes from |
|---|---|---|
| `CPU_SECONDS` | 15 / 60 / 8 / 2 microseconds | Python, modules, views and autograd around an op, forward, recompute (checkpointing's hooks), backward, optimizer: measured as `Ceilings.host` on one core of an AMD EPYC (Zen 4) at 2.6 GHz, PyTorch 2.13 |
| `HOST_SECONDS` | 20 / 60 / 13 / 7 microseconds | the same and one launch: not yet measured on a GPU's host |
| `LAUNCH_SECONDS` | 5 microseconds | a kernel's launch: assumed, not yet measured |
| `COMPILED_SECONDS` | 5 microseconds | a compiled kernel's launch from generated code: assumed, not yet measured |
| `COMPILED_CPU_SECONDS` | 2 microseconds | the same on the CPU, which launches nothing: assumed, not yet measured |
| `GRAPH_SECONDS` | 0.5 microseconds | a kernel inside a CUDA graph: assumed, not yet measured |
| `QUEUE` | 1,024 kernels | how far CUDA lets the host run ahead: commonly observed, not documented |
| `LINK_SHARE`, `PAGEABLE_SHARE` | 0.8, 0.4 | of PCIe's bandwidth, from pinned and from ordinary memory: assumed, not yet measured |
| `PREPARE_SECONDS` | 19 microseconds a sequence, 4 nanoseconds a token | reading and packing a window of text in one process: measured on one core of an AMD EPYC (Zen 4) at 2.6 GHz |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tightfit.calibration import Ceilings
from tightfit.devices import Device
from tightfit.models import ModelFacts
from tightfit.planning.timing.op_times import op_seconds
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.trace import OpClass, Phase, Trace

HOST_SECONDS = {"forward": 20e-6, "recompute": 60e-6, "backward": 13e-6, "optimizer": 7e-6}
LAUNCH_SECONDS = 5e-6
COMPILED_SECONDS, COMPILED_CPU_SECONDS = 5e-6, 2e-6
GRAPH_SECONDS = 0.5e-6
CPU_SECONDS = {"forward": 15e-6, "recompute": 60e-6, "backward": 8e-6, "optimizer": 2e-6}
QUEUE = 1024
LINK_SHARE, PAGEABLE_SHARE = 0.8, 0.4
UNKNOWN_LINK = 16e9
"""Bytes a second of a link that is not known: PCIe 3.0 with 16 lanes."""
PREPARE_SECONDS = (19e-6, 4e-9)
IMAGE_SIZE = 224
"""Pixels a side of images, for the bytes of a batch."""

PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)
CLASSES = tuple(OpClass)
DATA = len(PHASES) * len(CLASSES)
"""Where a step's data is counted; before it, every phase and in it every class."""
COMPILED = "fused "
"""How the names of a compiled region's kernels begin."""

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")
"""Ops that make the host wait for the device."""

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""Loss scaling's look at the gradients, which an optimizer that is not fused then waits for."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, and what they go to.

    forward, recompute, backward, optimizer: the device's time in each, waiting for the host included. data: copying
        the window to the device, and preparing it where nothing hides that. They sum to `seconds`.
    by_class: the same but for `data`, by the class of the op that ran or was waited for.
    launch_bound_seconds: the device's idle time, waiting for the host; on the CPU what comes on top of the ops.
    calibrated: whether this machine's own ceilings were used.
    notes: sentences about how sure it is, and what binds it.
    """

    seconds: float
    forward: float
    recompute: float
    backward: float
    optimizer: float
    data: float
    by_class: Mapping[OpClass, float]
    launch_bound_seconds: float
    calibrated: bool
    notes: tuple[str, ...] = field(default=())


class _Piece(NamedTuple):
    """An op of the simulation: seconds of the host and of the device, where it is counted, whether the host waits."""

    host: float
    device: float
    place: int
    waits: bool


def step_time(trace: Trace, recipe: Recipe, device: Device, ceilings: Ceilings | None = None) -> StepTime:
    """The time of the last step that the trace holds.

    recipe: resolved. ceilings: measured on this machine, or None. Raises TightfitError where nothing is known of the
    device, see `op_times.op_seconds`.
    """
    if ceilings is not None and ceilings.kind != device.kind:
        ceilings = None
    blocks = [([_data_piece(recipe, device, ceilings)], 1), *_blocks(trace, recipe, device, ceilings)]
    totals, idle = _one_clock(blocks) if device.kind == "cpu" else _two_clocks(blocks)
    seconds = math.fsum(totals)
    table = totals[:DATA].reshape(len(PHASES), len(CLASSES))
    by_phase = {phase: float(table[i].sum()) for i, phase in enumerate(PHASES)}
    return StepTime(
        seconds=seconds,
        forward=by_phase[Phase.FORWARD], recompute=by_phase[Phase.RECOMPUTE], backward=by_phase[Phase.BACKWARD],
        optimizer=by_phase[Phase.OPTIMIZER], data=float(totals[DATA]),
        by_class={c: float(table[:, i].sum()) for i, c in enumerate(CLASSES) if table[:, i].any()},
        launch_bound_seconds=idle,
        calibrated=ceilings is not None,
        notes=tuple(_notes(device, ceilings, recipe, seconds, idle)),
    )


def _blocks(
    trace: Trace, recipe: Recipe, device: Device, ceilings: Ceilings | None
) -> list[tuple[list[_Piece], int]]:
    """The step's ops as pieces, in stretches that run so many times each."""
    tf32 = bool(getattr(recipe.precision, "tf32", False))
    host = _host_seconds(recipe, device, ceilings)
    ops = list(trace.step_ops())
    fused = any("_fused_" in op.name for op, _ in ops if op.phase is Phase.OPTIMIZER)
    compiled = {op.phase for op, _ in ops if op.name.startswith(COMPILED)}
    known: dict[tuple[object, ...], _Piece] = {}
    blocks = []
    for times, run in groupby(ops, key=lambda pair: pair[1]):
        pieces = []
        for op, _ in run:
            key = (op.name, op.phase, op.shapes, op.dtype, op.flops, op.bytes_read, op.bytes_written, op.kernels)
            piece = known.get(key)
            if piece is None:
                phase = op.phase if op.phase in PHASES else Phase.FORWARD
                waits = any(f".{name}" in op.name for name in WAITS) or (UNSCALE in op.name and not fused)
                calls = op.op_class is OpClass.CONTRACTION and op.phase in compiled  # a compiled region's own
                issues = host["compiled" if calls or op.name.startswith(COMPILED) else phase.value]
                place = PHASES.index(phase) * len(CLASSES) + CLASSES.index(op.op_class)
                seconds = op_seconds(op, device, ceilings, tf32=tf32)
                issues += host["launch"] * max(op.kernels - 1, 0)
                piece = known[key] = _Piece(issues, seconds, place, waits)
            pieces.append(piece)
        blocks.append((pieces, times))
    return blocks


def _host_seconds(recipe: Recipe, device: Device, ceilings: Ceilings | None) -> dict[str, float]:
    """Seconds of the host for an op, by phase; for a compiled region's; for each further kernel of one op."""
    defaults = CPU_SECONDS if device.kind == "cpu" else HOST_SECONDS
    host = {**defaults, **(ceilings.host if ceilings is not None else {})}
    if device.kind == "cpu":
        return {**host, "compiled": COMPILED_CPU_SECONDS, "launch": 0.0}
    mode, backend = getattr(recipe.compile, "mode", ""), getattr(recipe.compile, "backend", "")
    graphs = backend == "cudagraphs" or mode in ("reduce-overhead", "max-autotune")
    return {**host, "compiled": GRAPH_SECONDS if graphs else COMPILED_SECONDS, "launch": LAUNCH_SECONDS}


def _one_clock(blocks: list[tuple[list[_Piece], int]]) -> tuple[np.ndarray, float]:
    """Seconds by phase and class, and those of them that the host took, where the host is the device."""
    totals, overhead = np.zeros(DATA + 1), 0.0
    for pieces, times in blocks:
        spent = [piece.host + piece.device for piece in pieces]
        totals += times * np.bincount([p.place for p in pieces], spent, minlength=totals.size)
        overhead += times * math.fsum(piece.host for piece in pieces)
    return totals, overhead


@dataclass
class _Clocks:
    """Where the host and the device are, and when the kernels still queued will be done."""

    host: float = 0.0
    device: float = 0.0
    queued: deque[float] = field(default_factory=lambda: deque(maxlen=QUEUE))

    def run(self, pieces: list[_Piece]) -> Iterator[tuple[float, float]]:
        """Run the pieces; of each, how far the device's clock moved, and how much of that it was idle."""
        host, device, queued = self.host, self.device, self.queued
        for issue, work, _, waits in pieces:
            if len(queued) == QUEUE:
                host = max(host, queued[0])
            host += issue
            idle = max(host - device, 0.0)
            device += idle + work
            queued.append(device)
            if waits:
                host = max(host, device)
            yield idle + work, idle
        self.host, self.device = host, device


def _two_clocks(blocks: list[tuple[list[_Piece], int]]) -> tuple[np.ndarray, float]:
    """Seconds by phase and class, and the device's idle ones among them, in the second of two steps."""
    clocks = _Clocks()
    for _ in range(2):
        totals, idle = np.zeros(DATA + 1), 0.0
        for pieces, times in blocks:
            places = [piece.place for piece in pieces]
            simulated = min(times, 3)
            for number in range(simulated):
                weight = times - simulated + 1 if number == simulated - 1 else 1
                moved = np.array(list(clocks.run(pieces))).reshape(-1, 2)
                totals += weight * np.bincount(places, moved[:, 0], minlength=totals.size)
                idle += weight * float(moved[:, 1].sum())
    return totals, idle


def _data_piece(recipe: Recipe, device: Device, ceilings: Ceilings | None) -> _Piece:
    """The window's way to the device: the host prepares it where no worker does, the device copies it."""
    task = TASKS[recipe.task]
    preparing = 0.0
    if recipe.loading.workers in (0, "auto") and task.reads == "tokens":
        preparing = recipe.batch_size * (PREPARE_SECONDS[0] + recipe.seq_len * PREPARE_SECONDS[1])
    if device.kind == "cpu":
        return _Piece(0.0, preparing, DATA, False)
    spec = task.batch_spec(recipe.batch_size, recipe.seq_len, ModelFacts(image_size=IMAGE_SIZE), recipe.data.packing)
    arrays = (*spec.inputs.values(), spec.labels)
    size = sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)
    pinned = recipe.loading.pin_memory
    link = (device.pcie_bandwidth or UNKNOWN_LINK) * (LINK_SHARE if pinned else PAGEABLE_SHARE)
    if ceilings is not None and ceilings.host_to_device:
        link = ceilings.host_to_device * (1.0 if pinned else PAGEABLE_SHARE / LINK_SHARE)
    return _Piece(preparing, size / link, DATA, False)


def _notes(
    device: Device, ceilings: Ceilings | None, recipe: Recipe, seconds: float, idle: float
) -> Iterator[str]:
    if ceilings is None:
        figures = "a rough default by the number of cores" if device.kind == "cpu" else "the data sheet's figures"
        yield f"not calibrated: times come from {figures} and shares of them that were not measured here"
    if device.kind == "cuda" and idle > 0.1 * seconds:
        help_more = "larger micro-batches, or compile, help" if recipe.mode == "train" else "a larger batch helps"
        yield (f"the device waits for the host {100 * idle / seconds:.0f} % of the time: {help_more} more than faster "
               "arithmetic")
    if TASKS[recipe.task].reads == "images":
        yield "decoding images is not counted: see the share of a run that is spent waiting for data"
