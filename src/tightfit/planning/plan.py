"""The plan: what a recipe would cost on a device in each of its variants, which variant to take, and why.

`Plan.to_json` is the object that `tightfit plan --json` prints and that a run's `plan.json` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.planning.alignment import Misalignment
from tightfit.planning.allocator.replay import Fits
from tightfit.planning.timing.errors import Work, intervals
from tightfit.recipe import CHOICES, CHOSEN_SLOTS, Recipe
from tightfit.techniques import SLOTS
from tightfit.text import size
from tightfit.trace import UntracedMemory

COMPILED_CHOICES = ("micro_batch_size", "precision", "backend", "checkpointing", "optimizer", "attention")
"""The recipe fields that a search decides where whole steps are compiled."""


def choices_of(recipe: Recipe) -> tuple[str, ...]:
    """The recipe fields that a search decides for it."""
    if recipe.backend.compiles_whole_steps:
        return COMPILED_CHOICES
    if recipe.mode == "train":
        return CHOICES
    return tuple(slot for slot in CHOSEN_SLOTS if not SLOTS[slot][0].trains_only)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted memory, in bytes.

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
    """

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
    context_uncertainty: int = 0

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
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    mfu: float
    error: float | None = None
    work: Mapping[Work, float] = field(default_factory=dict)
    calibrated: bool = False
    prefill_seconds: float = 0.0

    @property
    def throughput(self) -> float:
        """Tokens a second; samples a second for images."""
        return self.tokens_per_second or self.samples_per_second

    @property
    def unit(self) -> str:
        """Unit of `throughput`."""
        return "tokens/s" if self.tokens_per_second else "samples/s"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted memory and time of one resolved recipe.

    fits: into the whole device.
    safe: whether it also fits with `memory.margin` to spare; only what is safe is chosen, unless nothing is.
    unseen: memory that no trace shows; `memory` holds it.
    notes: sentences about how sure the figures are.
    """

    fits: Fits
    safe: bool
    memory: Memory
    time: Time
    unseen: tuple[UntracedMemory, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Bytes that the device lacks; 0 where it fits."""
        return self.memory.missing

    @property
    def fit_rank(self) -> int:
        """Rank of its fit: 0 with the margin to spare, 1 so after releasing cached memory, 2 without the margin, 3
        not at all."""
        if self.safe:
            return 0 if self.memory.peak_reserved <= self.memory.capacity - self.memory.margin else 1
        return 2 if self.fits != "no" else 3


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A resolved recipe and its cost.

    changes_numerics: what was picked for it that changes numerics, as `field=value`; empty where nothing was.
    reasons: sentences: why it is chosen, or what speaks against it.
    """

    recipe: Recipe
    estimate: Estimate
    changes_numerics: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def choices(self) -> dict[str, Any]:
        """The fields that a search decides, as plain values in the shortest form."""
        values = self.recipe.to_dict()
        return {field: values[field] for field in choices_of(self.recipe)}

    def to_json(self, rank: int) -> dict[str, Any]:
        """Plain values: bytes as integers, times in seconds."""
        memory, time = self.estimate.memory, self.estimate.time
        first = {"prefill_seconds": time.prefill_seconds} if self.recipe.mode == "inference" else {}
        return {
            "rank": rank,
            "recipe": self.recipe.to_dict(),
            "fits": self.estimate.fits,
            "memory": {
                "peak_reserved": memory.peak_reserved,
                "peak_allocated": memory.peak_allocated,
                "context": memory.context,
                "driver": memory.used,
                "driver_low": memory.used - memory.context_uncertainty,
                "driver_high": memory.used + memory.context_uncertainty,
                "host": memory.host,
                "by_category": dict(memory.by_category),
            },
            "time": {
                "step_seconds": time.step_seconds,
                "samples_per_second": time.samples_per_second,
                "tokens_per_second": time.tokens_per_second,
                "mfu": time.mfu,
                "intervals": intervals(
                    time.error, seconds={"step_seconds": time.step_seconds},
                    rates={"samples_per_second": time.samples_per_second, "tokens_per_second": time.tokens_per_second},
                ),
                **first,
            },
            "calibrated": time.calibrated,
            "unseen": [asdict(figure) for figure in self.estimate.unseen],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field written differently, and what the recipe then costs.

    text: as a person writes it, such as `checkpointing=every-block`.
    why: in a few words.
    """

    text: str
    why: str
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to what a person asks of a plan, as sentences; empty where there is nothing to say.

    why: why the chosen candidate is.
    next_best: what the next best would cost.
    would_not_fit: what would not fit, and by how much.
    smallest_change: the least change of one field with which the recipe as written fits; None where it fits, or where
        no single change helps.
    smallest_change_text: the same as a sentence, or that there is none; empty where it fits.
    smallest_gpu: the smallest device of the catalogue on which the recipe as written fits; None where none is known.
    smallest_gpu_text: the same as a sentence.
    smallest_gpu_changed_text: the same of the choice, where it changes numerics; else empty.
    open_fields: what leaving fields open would gain a recipe that pins them all; empty where that is nothing.
    offload: what ZeRO would move off the device; empty where something fits.
    misaligned: dimensions that leave tensor cores idle, with the gain from padding.
    """

    why: str = ""
    next_best: str = ""
    would_not_fit: tuple[str, ...] = ()
    smallest_change: Change | None = None
    smallest_change_text: str = ""
    smallest_gpu: Device | None = None
    smallest_gpu_text: str = ""
    smallest_gpu_changed_text: str = ""
    open_fields: str = ""
    offload: str = ""
    misaligned: tuple[Misalignment, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe's candidates on a device, the best first.

    asked: the recipe as written.
    candidates: those that fit, fastest first, then informative ones that do not.
    chosen: the best; None where nothing fits.
    notes: sentences about the search as a whole: what was refused and why, what was left out.
    tried: how many combinations were considered.
    predictions: how many of them, and of their probes, were traced.
    """

    device: Device
    asked: Recipe
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    answers: Answers
    notes: tuple[str, ...] = ()
    tried: int = 0
    predictions: int = 0

    @property
    def recipe(self) -> Recipe:
        """The chosen recipe, with no `auto` left. Raises Refused where nothing fits."""
        if self.chosen is None:
            raise Refused(self.nothing_fits())
        return self.chosen.recipe

    def nothing_fits(self) -> str:
        """One sentence for a plan without a choice: by how much the nearest misses, and what would help."""
        answers, device = self.answers, self.device
        parts = [f"nothing fits on {device.name}, which has {size(device.memory_bytes)}"]
        if self.candidates:
            parts.append(f"the nearest misses {size(self.candidates[0].estimate.missing)}")
        if answers.smallest_change is not None:
            parts.append(f"write {answers.smallest_change.text} ({answers.smallest_change.why})")
        elif answers.smallest_change_text:
            parts.append(answers.smallest_change_text[0].lower() + answers.smallest_change_text[1:].rstrip("."))
        if answers.smallest_gpu is not None:
            parts.append(f"it fits on {answers.smallest_gpu.name}")
        return ". ".join(text for text in ("; ".join(parts), answers.offload.rstrip(".")) if text)

    def training_arguments(self) -> dict[str, Any]:
        """The chosen recipe as arguments of transformers' `TrainingArguments`; on the processor where the plan is for
        it. Raises Refused as `recipe` does, and for a choice that the Hugging Face Trainer has no argument for."""
        from tightfit.recipe.hf_arguments import training_arguments

        if self.asked.mode == "inference":
            raise Refused("mode: 'inference' has no training arguments; write mode=train")
        here = {"device": "cpu"} if self.device.kind == "cpu" else {}
        return training_arguments(self.recipe.model_copy(update=here))

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`: bytes as integers, times in seconds. What is noted of the whole plan
        stands among the first candidate's reasons."""
        candidates = [candidate.to_json(rank) for rank, candidate in enumerate(self.candidates, start=1)]
        if candidates:
            noted = [*self.candidates[0].estimate.notes, *self.notes]
            candidates[0]["reasons"] = list(dict.fromkeys([*candidates[0]["reasons"], *noted]))
        return {
            "device": {"name": self.device.name, "memory_bytes": self.device.memory_bytes},
            "candidates": candidates,
        }
