"""Error to expect of a predicted time: by what its card's speed is known from, and by what its seconds go to.

Errors of kinds of work are independent of each other and of the card's: their squares add up. A speed lies within the
error of its prediction in nine runs of ten; `benchmarks/published.py` holds that to runs that others published.

| constant | figure | where it comes from |
|---|---|---|
| `CARD_ERROR` | 9, 24, 10 % | what published runs are off by beyond their kinds of work's errors, nine of ten: intervals in results/published.json |
| `WORK_ERROR` | 17, 5, 8, 32 % | what a card's recordings of such work are off by in all, nine cards and formats of ten, cards measured: work in results/ops_vs_gpu.json |
| `HOST_ERROR` | 100 % | what a host takes to issue ops, where a step is bound by that, nine of ten steps of an H100: results/plan_vs_gpu-h100-80gb-hbm3.json |
| `CALIBRATED_ERROR` | 11 % | products of a card whose share is fitted on half of its own recordings, at the median: products left out, there |
| `CALIBRATED_STEP` | 7 % | what steps on a calibrated H100 are off by beyond that, nine of ten: results/plan_vs_gpu-h100-80gb-hbm3.json |
| `PROCESSOR_ERROR` | 27 % | steps of a calibrated processor, nine of ten: results/search_quality.json |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from tightfit.devices import Device
from tightfit.planning.timing.attention import attention_length
from tightfit.planning.timing.op_times import FUSED, computes_on_tensor_cores
from tightfit.trace import COPIES, Op, Stream


class Work(StrEnum):
    """Kinds of work in a step, by how well their time is predicted."""

    TENSOR_CORES = "matrix products on tensor cores"
    PLAIN = "matrix products without tensor cores"
    ATTENTION = "fused attention"
    MEMORY = "element-wise, norms and copies"
    FUSED = "compiled and optimizer kernels"
    HOST = "waiting for the host"
    TRANSFERS = "waiting for copies from and to the host"
    COMMUNICATION = "waiting for other processes"


CARD_ERROR = {"measured": 0.09, "few": 0.24, "assumed": 0.1}
"""By `Device.evidence`."""
UNRECORDED = 0.32
"""Relative error of work that was never recorded: as large as the worst recorded one."""
WORK_ERROR = {Work.TENSOR_CORES: 0.17, Work.PLAIN: 0.05, Work.ATTENTION: 0.08, Work.MEMORY: 0.32,
              Work.FUSED: UNRECORDED, Work.TRANSFERS: UNRECORDED, Work.COMMUNICATION: UNRECORDED}
HOST_ERROR = 1.0
CALIBRATED_ERROR = 0.11
"""Error of the work that a calibration measures on the card itself: all but compiled kernels. That of waiting for
copies which it measured is recorded nowhere yet."""
CALIBRATED_STEP = 0.07
"""Error of a calibrated card's step as a whole."""
NOT_CALIBRATED = {Work.FUSED, Work.TRANSFERS, Work.COMMUNICATION}
PROCESSOR_ERROR = 0.27


def work_of(op: Op, device: Device, tf32: bool) -> Work:
    """The kind of work that an op's seconds on its stream are."""
    if op.stream in COPIES or op.stream is Stream.HOST:
        return Work.TRANSFERS
    if op.stream is Stream.NETWORK:
        return Work.COMMUNICATION
    if op.name.startswith(FUSED):
        return Work.FUSED
    if not op.flops:
        return Work.MEMORY
    if attention_length(op):
        return Work.ATTENTION
    return Work.TENSOR_CORES if computes_on_tensor_cores(op, device, tf32) else Work.PLAIN


def host_error(measured: bool) -> float:
    """Share of its seconds that a GPU's host takes longer at most, in nine cases of ten."""
    return CALIBRATED_ERROR if measured else HOST_ERROR


def seconds_error(
    work: Mapping[Work, float], device: Device, calibrated: bool, slower_host: float = 0.0
) -> float | None:
    """Seconds that a predicted time is off by at most in nine cases of ten; None where nothing was recorded, as of a
    processor that is not calibrated.

    work: its seconds by what they go to; of a difference of two times those of the difference, so that errors which
        both share cancel out. slower_host: seconds that a step takes longer where its host does by `host_error`.
    """
    total = sum(work.values())
    if device.kind == "cpu":
        return PROCESSOR_ERROR * abs(total) if calibrated else None
    card = (CALIBRATED_STEP if calibrated else CARD_ERROR[device.evidence]) * total
    return math.hypot(card, work_error(work, calibrated, slower_host))


def work_error(work: Mapping[Work, float], calibrated: bool, slower_host: float) -> float:
    """Seconds of that which are of the kinds of work, the card's apart; arguments as of `seconds_error`."""
    measured = set(WORK_ERROR) - NOT_CALIBRATED if calibrated else ()
    known = {**WORK_ERROR, **dict.fromkeys(measured, CALIBRATED_ERROR)}
    return math.hypot(slower_host, *(known[kind] * seconds for kind, seconds in work.items() if kind is not Work.HOST))


def speed_error(
    work: Mapping[Work, float], device: Device, calibrated: bool, slower_host: float = 0.0
) -> float | None:
    """Share that a predicted speed is off by at most in nine cases of ten, None as of `seconds_error`."""
    total = sum(work.values())
    error = seconds_error(work, device, calibrated, speed_lost(total, slower_host) * total)
    return error / total if error is not None and total > 0 else None


def speed_lost(seconds: float, slower_host: float) -> float:
    """Share of its speed that a step of some seconds loses where it takes `slower_host` longer."""
    return slower_host / (seconds + slower_host) if slower_host else 0.0


def intervals(
    error: float | None, *, seconds: Mapping[str, float], rates: Mapping[str, float]
) -> dict[str, tuple[float, float]] | None:
    """Both ends of what times, and rates whose share `error` is, lie within in nine cases of ten; None without one."""
    if error is None:
        return None
    return {**{name: (value / (1 + error), value / (1 - error)) for name, value in seconds.items()},
            **{name: (value * (1 - error), value * (1 + error)) for name, value in rates.items()}}
