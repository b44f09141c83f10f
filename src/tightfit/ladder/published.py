"""The published figures of the named ladders, as they were published.

Hugging Face's documentation, "Performance and scalability: how to fit a bigger model and train it faster"
(BERT-large and fp16), "Efficient training on multiple GPUs" (DP and DDP), and the University of Amsterdam's deep
learning notebook "Training models at scale: single-GPU transformers" (its transformer).
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.ladder.rungs import Published

MIB_OF_NOTEBOOK_GB = 1000
"""What the notebook calls 1 GB, in MiB."""

BERT_LARGE = {
    "fp32": Published(seconds=57.82, samples_per_second=8.86, memory_mib=14_949),
    "accumulation": Published(seconds=66.03, samples_per_second=7.75, memory_mib=8_681),
    "checkpointing": Published(seconds=85.47, samples_per_second=5.99, memory_mib=6_775),
    "fp16": Published(seconds=27.46, samples_per_second=18.64, memory_mib=13_939),
    "fp16 all": Published(seconds=50.76, samples_per_second=10.09, memory_mib=7_275),
    "adafactor": Published(seconds=64.31, samples_per_second=7.96, memory_mib=12_295),
    "adafactor all": Published(seconds=56.54, samples_per_second=9.06, memory_mib=4_847),
    "8-bit": Published(seconds=55.95, samples_per_second=9.15, memory_mib=13_085),
    "8-bit all": Published(seconds=49.46, samples_per_second=10.35, memory_mib=5_363),
}
"""BERT-large on one V100 16 GB: 512 sequences of 512 tokens once through, 128 steps. Memory as the driver reports it,
of which a context with one tiny tensor took BERT_LARGE_CONTEXT_MIB."""
BERT_LARGE_CONTEXT_MIB = 1_343

FP16_BATCH = {
    (8, "fp32"): Published(memory_mib=4_247), (8, "fp16"): Published(memory_mib=4_163),
    (16, "fp32"): Published(memory_mib=4_971), (16, "fp16"): Published(memory_mib=4_793),
    (32, "fp32"): Published(memory_mib=6_827), (32, "fp16"): Published(memory_mib=6_207),
    (64, "fp32"): Published(memory_mib=10_037), (64, "fp16"): Published(memory_mib=8_061),
}  # fmt: skip
"""BERT-base classification, sequences of 128, by batch and format; on each of two GPUs."""

TWO_GPUS = {
    "dp": Published(seconds=110), "ddp": Published(seconds=101), "ddp-no-p2p": Published(seconds=131),
}  # fmt: skip
"""GPT-2 on wikitext, 4 sequences a GPU, 200 steps on two TITAN RTX with NVLink."""

TRANSFORMER = {
    "fp32, scan": Published(seconds=2.1, memory_mib=20.6 * MIB_OF_NOTEBOOK_GB),
    "bf16, scan": Published(seconds=1.1, memory_mib=14.6 * MIB_OF_NOTEBOOK_GB),
    "bf16, no scan": Published(seconds=0.73, memory_mib=8.8 * MIB_OF_NOTEBOOK_GB),
    "bf16, scan, remat MLP+Attn": Published(seconds=0.91, memory_mib=3.9 * MIB_OF_NOTEBOOK_GB),
    "bf16, scan, remat Block": Published(seconds=0.96, memory_mib=3.8 * MIB_OF_NOTEBOOK_GB),
    "1 minibatch": Published(seconds=0.86, memory_mib=6.2 * MIB_OF_NOTEBOOK_GB),
    "batch 256": Published(memory_mib=15 * MIB_OF_NOTEBOOK_GB),
}
"""The notebook's transformer in JAX on one A5000 24 GB, seconds a step; memory as JAX's own profiler reports it."""

GUIDES = (
    "Efficient Training on a Single GPU (transformers 4.30)", "GPU (transformers, 2024)",
    "Software Tune Up For The Best Performance (Machine Learning Engineering)",
)  # fmt: skip
"""The guides that have a table of features, in the order of `Words`."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """What each guide says of a feature: whether it improves speed, and memory; `-` where it says nothing. A bracket is
    the guide's own, for what is negligible. also: what guides say of it elsewhere."""

    speed: tuple[str, str, str]
    memory: tuple[str, str, str]
    also: str = ""


YES = ("yes", "yes", "yes")
FEATURES = {
    "gradient accumulation": Words(
        speed=("no", "no", "yes"), memory=YES,
        also="20 to 30 % faster at an equal micro-batch, by fewer optimizer steps; slower in the measured ladder"),
    "gradient checkpointing": Words(
        speed=("no", "no", "yes"), memory=YES, also="20 to 30 % slower; the batch can double or quadruple"),
    "mixed precision": Words(
        speed=YES, memory=("(no)", "depends", "no"), also="fp16 2 to 5 times as fast, tf32 up to 3 times"),
    "batch size": Words(
        speed=YES, memory=YES, also="a bigger global batch asks for another learning rate and warm-up"),
    "optimizer choice": Words(speed=YES, memory=YES, also="Apex's fused AdamW called the fastest"),
    "data loading": Words(speed=YES, memory=("no", "no", "no")),
    "DeepSpeed ZeRO": Words(speed=("no", "-", "no"), memory=("yes", "-", "yes")),
    "empty cache steps": Words(speed=("-", "no", "-"), memory=("-", "yes", "-"), also="about 10 % slower"),
    "torch.compile": Words(speed=("-", "yes", "-"), memory=("-", "no", "-")),
    "SDPA": Words(speed=("-", "yes", "-"), memory=("-", "yes", "-")),
}  # fmt: skip
"""The guides' words for each feature, by the name that a rung's `feature` has."""
