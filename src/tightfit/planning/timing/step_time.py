"""Step time: the device's time of each op, the host's to issue it, the link's for copies.

On a CUDA device the host issues ops ahead of the device. Where it falls behind, the device waits, and the step is bound
by launches; where a dependency says so, the device waits for copies. A read of a value makes the host wait for the
device. On the CPU all runs on the host. See `streams` for the simulation.

| constant | figure | where it comes from |
|---|---|---|
| `CPU_SECONDS` | 15 / 60 / 8 / 2 microseconds | Python, modules, views and autograd around an op, forward, recompute (checkpointing's hooks), backward, optimizer: measured as `Calibration.host` on one core of an AMD EPYC (Zen 4) at 2.6 GHz, PyTorch 2.13 |
| `HOST_SECONDS` | 20 / 60 / 13 / 7 microseconds | the same and one launch; published runs bear it out. An H100's host was slower: 32 / 198 / 36 / 8 (16 cores of an Intel Xeon in a virtual machine, PyTorch 2.11) |
| `LAUNCH_SECONDS` | 5 microseconds | a kernel's launch: assumed, not yet measured |
| `CALL_SECONDS` | 150 microseconds | a compiled graph's call, its guards and what AOTAutograd wraps around it: 190 forward and 140 backward, measured on one core of an AMD EPYC (Zen 4) at 2.6 GHz, PyTorch 2.13 |
| `COMPILED_SECONDS` | 5 microseconds | a compiled kernel's launch from generated code: assumed, not yet measured |
| `COMPILED_CPU_SECONDS` | 2 microseconds | the same on the CPU, which launches nothing: assumed, not yet measured |
| `GRAPH_SECONDS` | 0.5 microseconds | a kernel inside a CUDA graph: assumed, not yet measured |
| `PREPARE_SECONDS` | 19 microseconds a sequence, 4 nanoseconds a token | reading and packing a global batch of text in one process: measured on one core of an AMD EPYC (Zen 4) at 2.6 GHz | """  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from tightfit.calibration import Calibration
from tightfit.devices import Device
from tightfit.model_facts import ModelFacts
from tightfit.planning.timing.communication import Communication, communication_of
from tightfit.planning.timing.copies import Copies, copies_of
from tightfit.planning.timing.link import contended, copy_rate
from tightfit.planning.timing.op_times import lasting_seconds
from tightfit.planning.timing.streams import Elapsed, Piece, Segment, lanes, simulate
from tightfit.planning.timing.uncertainty import Work, host_error, work_of
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.trace import FUSED_PREFIX, PAGEABLE, Op, OpClass, Phase, Stream, Trace
from tightfit.trace.lanes import Stretch

HOST_SECONDS = {"forward": 20e-6, "recompute": 60e-6, "backward": 13e-6, "optimizer": 7e-6}
LAUNCH_SECONDS = 5e-6
CALL_SECONDS = 150e-6
COMPILED_SECONDS, COMPILED_CPU_SECONDS = 5e-6, 2e-6
GRAPH_SECONDS = 0.5e-6
CPU_SECONDS = {"forward": 15e-6, "recompute": 60e-6, "backward": 8e-6, "optimizer": 2e-6}
PREPARE_SECONDS = (19e-6, 4e-9)
HIDDEN = 0.7
"""Share of a step that issuing its ops may take without making the device wait."""
IMAGE_SIZE = 224
"""Pixels a side of images, for the bytes of a batch."""

TIMED_PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", PAGEABLE)
"""Ops that make the host wait for the device."""

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""Loss scaling's look at the gradients, which an optimizer that is not fused then waits for."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, and what they go to.

    forward, recompute, backward, optimizer: the device's time in each, waiting for the host and for copies included.
    data: copying the global batch to the device, and preparing it where nothing hides that. They sum to `seconds`.
    work: seconds of `seconds` by what takes them, without the data's.
    copies: between host and device; None without. communication: between processes; None without.
    slower_host: seconds that it takes longer where the host does, by as much as its own time may be off.
    calibrated: whether this machine's own calibration was used.
    notes: sentences about how sure it is, and what binds it.
    """

    seconds: float
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    work: Mapping[Work, float] = field(default_factory=dict)
    copies: Copies | None = None
    communication: Communication | None = None
    slower_host: float = 0.0
    calibrated: bool = False
    notes: tuple[str, ...] = ()


def step_time(trace: Trace, recipe: Recipe, device: Device, calibration: Calibration | None = None) -> StepTime:
    """The time of the last step that the trace holds.

    recipe: resolved. calibration: measured on this machine, or None. Raises TightfitError where nothing is known of the
    device, see `op_times.op_seconds`.
    """
    main, calibration = _main(device), _own(calibration, device)
    device = _for_all(device, recipe)
    alone, work = _segments(trace, recipe, device, calibration)
    segments = _together(alone, main, calibration)
    found = simulate(segments, main)
    copies = None if main is Stream.HOST else copies_of(trace, recipe, alone, segments, found)
    communication = None if main is Stream.HOST else communication_of(trace, device, segments, found)
    waited = {Work.TRANSFERS: found.for_streams, Work.COMMUNICATION: 0.0}
    if communication is not None:
        waited[Work.COMMUNICATION] = min(communication.added, found.for_streams)
        waited[Work.TRANSFERS] -= waited[Work.COMMUNICATION]
    return StepTime(
        seconds=found.seconds, **{phase.value: found.by_phase[phase] for phase in (*TIMED_PHASES, Phase.DATA)},
        work={**work, Work.HOST: found.for_host, **waited}, copies=copies, communication=communication,
        slower_host=_slower_host(segments, main, found, host_error(calibration is not None and bool(calibration.host))),
        calibrated=calibration is not None,
        notes=tuple(_notes(device, recipe, found, waited[Work.TRANSFERS])),
    )  # fmt: skip


def step_lanes(
    trace: Trace, recipe: Recipe, device: Device, calibration: Calibration | None = None
) -> tuple[Stretch, ...]:
    """Times at which the device computes and copies in that step; arguments as of `step_time`."""
    main, calibration = _main(device), _own(calibration, device)
    segments = _segments(trace, recipe, _for_all(device, recipe), calibration)[0]
    return lanes(_together(segments, main, calibration), main)


def _for_all(device: Device, recipe: Recipe) -> Device:
    """The device, with as many beside it as the recipe has processes: in one machine, where nothing else is said."""
    count = recipe.parallel.process_count
    return device if count == device.world else replace(device, cards=count, machines=1)


def _main(device: Device) -> Stream:
    return Stream.HOST if device.kind == "cpu" else Stream.COMPUTE


def _own(calibration: Calibration | None, device: Device) -> Calibration | None:
    """The calibration, where it is of such a device."""
    return calibration if calibration is not None and calibration.kind == device.kind else None


def _together(segments: list[Segment], main: Stream, calibration: Calibration | None) -> list[Segment]:
    """The segments with what copies both ways cost one another, where that was measured."""
    if calibration is None or calibration.link is None:
        return segments
    return contended(segments, calibration.link, simulate(segments, main).seconds)


def _segments(
    trace: Trace, recipe: Recipe, device: Device, calibration: Calibration | None
) -> tuple[list[Segment], dict[Work, float]]:
    """The step's data and its ops as pieces, in stretches that run so many times each, and the ops' seconds by what
    takes them."""
    host = _host_seconds(recipe, device, calibration)
    ops = list(trace.step_ops())
    fused = any("_fused_" in op.name for op, _ in ops if op.phase is Phase.OPTIMIZER)
    compiled = {op.phase for op, _ in ops if op.name.startswith(FUSED_PREFIX)}
    awaited = {tick for op, _ in ops for tick in op.after}

    def piece_of(op: Op) -> Piece:
        phase = op.phase if op.phase in TIMED_PHASES else Phase.FORWARD
        waits = any(f".{name}" in op.name for name in WAITS) or (UNSCALE in op.name and not fused)
        calls = op.op_class is OpClass.CONTRACTION and op.phase in compiled  # a compiled region's own
        issues = host["compiled" if calls or op.name.startswith(FUSED_PREFIX) else phase.value]
        issues += host["launch"] * max(op.kernels - 1, 0) + CALL_SECONDS * op.calls
        stream = Stream.HOST if device.kind == "cpu" else op.stream
        return Piece(issues, lasting_seconds(op, device, calibration, tf32=recipe.tf32), phase, waits, stream)

    known: dict[tuple[object, ...], tuple[Piece, Work]] = {}
    segments: list[Segment] = [([_data_piece(recipe, device, calibration)], 1)]
    work = dict.fromkeys(Work, 0.0)
    for times, run in groupby(ops, key=lambda pair: pair[1]):
        pieces = []
        for op, _ in run:
            key = (op.name, op.phase, op.shapes, op.dtype, op.flops, op.bytes_read, op.bytes_written, op.kernels,
                   op.calls, op.stream, op.leading, op.layout)
            found = known.get(key)
            if found is None:
                found = known[key] = piece_of(op), work_of(op, device, recipe.tf32)
            piece, kind = found
            work[kind] += times * piece.work
            if op.after or op.tick in awaited:
                piece = piece._replace(tick=op.tick, after=op.after)
            pieces.append(piece)
        segments.append((pieces, times))
    return segments, work


def _slower_host(segments: list[Segment], main: Stream, found: Elapsed, share: float) -> float:
    """Seconds that the step takes longer with a host that takes that share longer. Where the device does not wait
    for it, and would not then, nothing is simulated."""
    if main is Stream.HOST:
        return 0.0
    issuing = sum(times * piece.host for pieces, times in segments for piece in pieces)
    if issuing * (1 + share) < HIDDEN * found.seconds:
        return share * found.for_host
    slower = [([piece._replace(host=piece.host * (1 + share)) for piece in pieces], times)
              for pieces, times in segments]
    return simulate(slower, main).seconds - found.seconds


def _host_seconds(recipe: Recipe, device: Device, calibration: Calibration | None) -> dict[str, float]:
    """Seconds of the host for an op, by phase; for a compiled region's; for each further kernel of one op."""
    defaults = CPU_SECONDS if device.kind == "cpu" else HOST_SECONDS
    host = {**defaults, **(calibration.host if calibration is not None else {})}
    if device.kind == "cpu":
        return {**host, "compiled": COMPILED_CPU_SECONDS, "launch": 0.0}
    graphs = recipe.compile != "auto" and recipe.compile.records_graphs
    return {**host, "compiled": GRAPH_SECONDS if graphs else COMPILED_SECONDS, "launch": LAUNCH_SECONDS}


def _data_piece(recipe: Recipe, device: Device, calibration: Calibration | None) -> Piece:
    """The global batch's way to the device: the host prepares it where no worker does, the device copies it."""
    task, recipe = TASKS[recipe.task], recipe.parallel.of_one_process(recipe)
    preparing = 0.0
    if recipe.loading.workers in (0, "auto") and task.reads == "tokens":
        preparing = recipe.batch_size * (PREPARE_SECONDS[0] + recipe.seq_len * PREPARE_SECONDS[1])
    if device.kind == "cpu":
        return Piece(0.0, preparing, Phase.DATA, stream=Stream.HOST)
    spec = task.batch_spec(recipe.batch_size, recipe.seq_len, ModelFacts(image_size=IMAGE_SIZE), recipe.data.packing)
    arrays = (*spec.inputs.values(), spec.labels)
    size = sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)
    bandwidth = copy_rate(device, calibration, Stream.COPY_IN, pinned=recipe.loading.pin_memory)
    return Piece(preparing, size / bandwidth, Phase.DATA)


def _notes(device: Device, recipe: Recipe, found: Elapsed, for_copies: float) -> Iterator[str]:
    seconds, idle = found.seconds, found.for_host
    if device.kind == "cuda" and idle > 0.1 * seconds:
        help_more = "larger micro-batches, or compile, help" if recipe.mode == "train" else "a larger batch helps"
        yield (f"the device waits for the host {100 * idle / seconds:.0f} % of the time: {help_more} more than faster "
               "arithmetic")
    if for_copies > 0.1 * seconds:
        yield (f"the device waits {100 * for_copies / seconds:.0f} % of the time for copies from and to the host: more "
               "tokens in a step, or less in the host's memory, help")
    if device.kind == "cpu" and recipe.parallel.process_count > 1:
        yield "parallel: communication is not in a processor's predicted time"
    if TASKS[recipe.task].reads == "images":
        yield "decoding images is not counted: see the share of a run that is spent waiting for data"
