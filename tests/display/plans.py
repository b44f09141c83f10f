"""Plans made by hand: their figures are chosen for what they show, not predicted."""

from __future__ import annotations

from dataclasses import replace

from tightfit.devices import Device
from tightfit.planning.alignment import Misalignment
from tightfit.planning.costs import Estimate, FitRank, Memory, Time
from tightfit.planning.plan import Answers, Candidate, Change, Plan
from tightfit.planning.timing.copies import Copies
from tightfit.recipe import Recipe
from tightfit.trace import UntracedMemory

GIB = 1 << 30
UNSEEN = (UntracedMemory(name="CUDA context", bytes=GIB, where="context", source="measured on a card"),
          UntracedMemory(name="cuBLAS workspaces", bytes=32 << 20, where="allocator", source="its handbook"))
CARD = Device(kind="cuda", name="Test Card", memory_bytes=24 * GIB, capability=(8, 9))
RESOLVED = {
    "model": "gpt2", "seq_len": 512, "batch_size": 64, "micro_batch_size": 16, "precision": "bf16", "loss": "plain",
    "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa", "compile": "off",
}


def memory(scale=1.0, **changes):
    """12 GiB of categories times `scale`, 1 GiB cached and 1 GiB of context: 14 GiB used at scale 1."""
    gib = {"weights": 1, "gradients": 1, "optimizer": 2, "activations": 6, "temporary": 1.5, "other": 0.5}
    held = {name: round(count * scale * GIB) for name, count in gib.items()}
    total = sum(held.values())
    values = {
        "device_rank": FitRank.SAFE,
        "peak_allocated": total, "peak_reserved": total + GIB, "context": GIB, "host": 0, "by_category": held,
        "peak_in": "backward of a micro-batch", "capacity": 23 * GIB, "margin": GIB,
    }
    return Memory(**{**values, **changes})


def estimate(scale=1.0, *, tokens=10_000.0, notes=(), calibrated=False, untraced=(), **changes):
    time = Time(step_seconds=64 * 512 / (tokens or 1e4), samples_per_second=tokens / 512 or 20.0,
                tokens_per_second=tokens, mfu=0.4, calibrated=calibrated)
    return Estimate(memory=memory(scale, **changes), time=time, untraced=untraced, notes=notes)


def candidate(cost, *, changes_numerics=(), reasons=(), **fields):
    return Candidate(recipe=Recipe.from_dict({**RESOLVED, **fields}), estimate=cost,
                     changes_numerics=changes_numerics, reasons=reasons)


def fitting():
    """Three candidates: one that is chosen, one that changes numerics, one too large."""
    chosen = candidate(estimate(notes=("mind the gap",), untraced=UNSEEN))
    eight = candidate(estimate(0.5, tokens=9_000.0, retries=1), optimizer="adamw-8bit",
                      changes_numerics=("optimizer=adamw-8bit",), micro_batch_size=24)
    large = candidate(estimate(2.0, device_rank=FitRank.NONE, tokens=11_000.0, missing=3 * GIB), micro_batch_size=32)
    misaligned = Misalignment(field="vocab_size", value=50257, multiple=8, padded=50264, gain=0.05,
                              change="pad_vocab_to=8")
    answers = Answers(
        why="The fastest that fits.", next_best="optimizer=adamw-8bit: 10 % slower.",
        would_not_fit=("micro_batch_size=32 does not fit: it misses 3.0 GiB.",), smallest_gpu=CARD,
        smallest_gpu_text="No smaller GPU would do.", misaligned=(misaligned,),
    )
    return Plan(device=CARD, asked=Recipe.from_dict({"model": "gpt2", "seq_len": 512}), chosen=chosen,
                candidates=(chosen, eight, large), answers=answers, notes=("left out: flex cannot serve",),
                tried=1234, predictions=7)


COPIES = Copies(bytes_in=60 * GIB, bytes_out=50 * GIB, seconds_in=3.0, seconds_out=2.5, seconds=5.5, added=1.1,
                step_seconds=11.0, hidden_from=15)


def streamed(host_bytes=64 * GIB):
    """One candidate that keeps 48 GiB in the host's memory, beside one that keeps nothing there."""
    held = {"weights": 12 * GIB, "gradients": 12 * GIB, "optimizer": 16 * GIB, "activations": 4 * GIB, "other": 0}
    cost = estimate(0.5, host=48 * GIB, host_by_category=held)
    moving = candidate(replace(cost, time=replace(cost.time, copies=COPIES)), offload="host", accumulation="by-block")
    return Plan(device=replace(CARD, host_bytes=host_bytes), asked=Recipe.from_dict({"model": "gpt2", "seq_len": 512}),
                candidates=(candidate(estimate()), moving), chosen=moving, answers=Answers())


def nothing_fits():
    """One candidate, too large, and what would help."""
    large = candidate(estimate(9.0, device_rank=FitRank.NONE, missing=90 * GIB), micro_batch_size=1)
    answers = Answers(
        would_not_fit=("micro_batch_size=1 does not fit: it misses 90.0 GiB.", "loss=plain does not fit either."),
        smallest_change=Change(text="checkpointing=every-block", why="recompute", estimate=estimate()),
        smallest_change_text="The smallest that makes it fit: checkpointing=every-block (recompute).",
        smallest_gpu_text="The smallest GPU is Big Card.",
        adapters="base=nf4 would take 5.0 GiB.",
        offload="64 GiB of host memory would do.",
    )
    return Plan(device=CARD, asked=large.recipe, candidates=(large,), chosen=None, answers=answers)
