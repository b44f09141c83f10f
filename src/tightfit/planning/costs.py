"""The cost of one resolved recipe on a device: memory and time, as a plan gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from tightfit.planning.timing.communication import Communication
from tightfit.planning.timing.copies import Copies
from tightfit.planning.timing.uncertainty import Work, intervals
from tightfit.text import size
from tightfit.trace import UntracedMemory


class FitRank(IntEnum):
    """Ranks of a fit, the best first: with the margin to spare, without the margin, not at all."""

    SAFE = 0
    TIGHT = 1
    NONE = 2

    @property
    def is_safe(self) -> bool:
        """Whether the margin is left free."""
        return self is FitRank.SAFE

    @property
    def fits(self) -> bool:
        return self < FitRank.NONE


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted memory, in bytes, and how well it fits a device and its host.

    device_rank: how well it fits the device; only what leaves the margin free is chosen, unless nothing does.
    peak_allocated: the most that tensors hold at once, as the device's allocator rounds them; unrounded on the CPU.
    peak_reserved: the most that the allocator holds, were there no limit; on the CPU the same as peak_allocated.
    context: what the device's driver and kernels take outside the allocator, `context_uncertainty` more or less.
    host: the machine's own memory, where the device is not it.
    by_category: what is held at the peak, by `trace.Category` values; sums to peak_allocated. Rounding is `other`.
    peak_in: what runs at the peak, such as `backward of a micro-batch`.
    capacity: what the allocator may hold: the device's memory less the context.
    margin: how much of the capacity is to stay free for a plan to be called safe.
    missing: how far the capacity would have to grow; 0 where it serves.
    host_missing: the same of the host's memory, for what is offloaded to it; 0 where that is not known.
    host_assumed: whether what the host has is assumed.
    host_margin: how much of the host's memory is to stay free; what is left has to serve.
    host_by_category: of `host`, what is offloaded, at its own peak; empty where nothing is. The rest is not traced.
    host_blocks: how many blocks have weights, gradients or optimizer states in host memory. host_states_outside: bytes
        of these of what lies outside of the blocks: states of embeddings and head.
    drive: bytes that wait on a drive.
    given_back: cached bytes that `empty_cache_steps` gives back to the device, in so many `pieces`.
    retries: how often the allocator releases cached memory to make room, with the margin free where that serves.
    taken_again: segments of these, and pages of expandable ones, in a step.
    """

    device_rank: FitRank
    peak_allocated: int
    peak_reserved: int
    context: int
    host: int
    by_category: Mapping[str, int]
    peak_in: str
    capacity: int
    margin: int
    missing: int = 0
    host_missing: int = 0
    host_assumed: bool = False
    host_margin: int = 0
    context_uncertainty: int = 0
    host_by_category: Mapping[str, int] = field(default_factory=dict)
    host_blocks: int = 0
    host_states_outside: int = 0
    drive: int = 0
    given_back: int = 0
    pieces: int = 0
    retries: int = 0
    taken_again: int = 0

    @property
    def fit_rank(self) -> FitRank:
        """Rank of the fit on the device and its host."""
        return FitRank.NONE if self.host_missing else self.device_rank

    @property
    def verdict(self) -> str:
        """Whether it fits, as a plan writes it."""
        return "with-retries" if self.fit_rank.is_safe and self.retries else ("yes", "tight", "no")[self.fit_rank]

    @property
    def used(self) -> int:
        """Bytes of the device's memory in use at the peak, were there no limit: reserved and context, as the driver and
        nvidia-smi count them."""
        return self.peak_reserved + self.context

    @property
    def needed(self) -> int:
        """Bytes of the device's memory with which it would just fit: where something is missing, less than `used` by
        the cached memory that the allocator would give back before it failed; else `used`."""
        return self.capacity + self.context + self.missing if self.missing else self.used

    @property
    def demand(self) -> int:
        """Bytes of the device's memory with which it fits, the margin free: at most what there are, where they serve;
        where the host's memory does not, more than the device has by what is missing there."""
        needed, there = self.used + self.margin, self.capacity + self.context
        return min(needed, there) if self.fit_rank.is_safe else max(needed, there + self.host_missing)

    @property
    def host_too_small(self) -> bool:
        """Whether the host's memory would not serve without any activations there either."""
        return self.host_missing > self.host_by_category.get("activations", 0)

    @property
    def host_needed(self) -> int:
        """Bytes of a host's memory that would serve where this one's do not, as large a share of it free."""
        there = self.host - self.host_missing + self.host_margin
        return round(self.host / (1 - self.host_margin / there)) if there else self.host

    @property
    def lacking(self) -> str:
        """Missing memory in words: of the device, of the host, or of both."""
        parts = [size(self.missing)] if self.missing or not self.host_missing else []
        parts += [f"{size(self.host_missing)} of host memory"] if self.host_missing else []
        return " and ".join(parts)

    @property
    def notes(self) -> list[str]:
        """The sentence that says why the host's memory does not serve."""
        if not self.host_missing:
            return []
        there = f"{size(self.host - self.host_missing)} for it{', with its margin free' * (self.host_margin > 0)}"
        return [f"host memory: {size(self.host)} are needed for what is offloaded to it and for loading, and the "
                f"machine {'is assumed to have' if self.host_assumed else 'has'} {there}"]

    def to_json(self) -> dict[str, Any]:
        """Plain values, in bytes."""
        offloaded = {"host_by_category": dict(self.host_by_category)} if self.host_by_category else {}
        return {
            "peak_reserved": self.peak_reserved,
            "peak_allocated": self.peak_allocated,
            "context": self.context,
            "driver": self.used,
            "driver_low": self.used - self.context_uncertainty,
            "driver_high": self.used + self.context_uncertainty,
            "host": self.host,
            **({"drive": self.drive} if self.drive else {}),
            "by_category": dict(self.by_category),
            **offloaded,
        }


@dataclass(frozen=True, kw_only=True)
class Time:
    """Predicted time of one optimizer step; with `mode: inference`, of generating from one batch of prompts.

    tokens_per_second: of the sequences read; of those generated where something is; 0 for images.
    mfu: model FLOPs utilization, FLOPs of forward and backward without recomputation over the device's dense peak, 0
        to 1; 0 where the peak is not known.
    error: share that the speed is off by at most in nine runs of ten; None where that is not known.
    work: seconds of the step by what they go to.
    calibrated: whether times come from measurements of the machine at hand; else from the device's data sheet.
    prefill_seconds: of `step_seconds`, how long until the first token; 0 for training.
    slower_host: seconds that it takes longer where the host does, by as much as its own time may be off.
    copies: of a step between host and device; None where it makes none. communication: between processes, likewise.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    mfu: float
    error: float | None = None
    work: Mapping[Work, float] = field(default_factory=dict)
    calibrated: bool = False
    prefill_seconds: float = 0.0
    slower_host: float = 0.0
    copies: Copies | None = None
    communication: Communication | None = None

    def longer(self, by: float) -> Time:
        """The time of a step in which the device waits so many seconds more for the host."""
        share = self.step_seconds / (self.step_seconds + by) if by else 1.0
        return replace(
            self, step_seconds=self.step_seconds + by, samples_per_second=self.samples_per_second * share,
            tokens_per_second=self.tokens_per_second * share, mfu=self.mfu * share,
            work={**self.work, Work.HOST: self.work.get(Work.HOST, 0.0) + by},
        )  # fmt: skip

    @property
    def throughput(self) -> float:
        """Tokens a second; samples a second for images."""
        return self.tokens_per_second or self.samples_per_second

    @property
    def unit(self) -> str:
        """Unit of `throughput`."""
        return "tokens/s" if self.tokens_per_second else "samples/s"

    def to_json(self) -> dict[str, Any]:
        """Plain values, in seconds and shares."""
        first = {"prefill_seconds": self.prefill_seconds} if self.prefill_seconds else {}
        copies = {} if self.copies is None else {"copies": self.copies.to_json()}
        communication = {} if self.communication is None else {"communication": self.communication.to_json()}
        return {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu or None,
            "intervals": intervals(
                self.error, seconds={"step_seconds": self.step_seconds},
                rates={"samples_per_second": self.samples_per_second, "tokens_per_second": self.tokens_per_second},
            ),
            **first,
            **copies,
            **communication,
        }


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted memory and time of one resolved recipe.

    untraced: memory that no trace shows; `memory` holds it.
    notes: sentences about how sure the figures are; those of `memory` are its own.
    """

    memory: Memory
    time: Time
    untraced: tuple[UntracedMemory, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Bytes that the device lacks; 0 where it fits."""
        return self.memory.missing

    @property
    def fit_rank(self) -> FitRank:
        """Rank by how well it fits."""
        return self.memory.fit_rank
