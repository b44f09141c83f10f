"""Why predictions of published runs are far off, where that is known: a pattern of ids, the figure, the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

POWER = ("the card's power limit of 70 to 72 W holds its clock far below the boost clock that the data sheet's peak is "
         "of, and that times are predicted from")
LOOP = ("the update is BertAdam's Python loop of 14 ops a tensor, behind a norm that is read back, and is predicted as "
        "PyTorch's loop of eight; the fewer samples, the more it weighs")
TF32 = ("every run of this source in tf32 on Hopper and the B200 is predicted faster, beside what was published, than "
        "the same in 16 bits: products of tf32 reach less than the share of the peak that is taken for both, and the "
        "update is a Python loop of 14 ops a tensor")
OF_2020 = ("the code of 2020 keeps more for the backward pass: its author's later code trains 1.3 to 2 times the batch "
           "in the same memory")

GEFORCE = ("every run of this source on this card, in either format, is predicted too slow alike: GeForce cards hold a "
           "clock above the one that the data sheet's peaks are of")
APEX = ("apex's FusedLayerNorm, and bias and GELU in one kernel, move less memory than PyTorch's own that stand for "
        "them: this source's 44 runs in 16 bits are predicted 10 % too slow at the median")
LITGPT = ("LitGPT's own model is predicted as transformers': it repeats keys and values for every head that queries "
          "them, and keeps those and the rotated queries and keys once more")
LOSS_16 = "cross-entropy stays in bf16 there, at about 5 bytes a logit; a recipe's is in fp32, at 14"
PADDED = ("rows are short texts padded to 8,192, whose mask keeps flash attention's kernels out, and deterministic "
          "algorithms are on: full fine-tuning takes 1.8 times as long as in fms-acceleration's table, where a model "
          "of the same size takes as many tokens on the same card")

REASONS: tuple[tuple[str, str, str], ...] = (
    ("neusight-(t4|l4)-", "speed", POWER),
    ("lambda-LambdaOD1x1xGH200.*fp32", "speed", "published below the same source's H100 SXM, whose peaks are the same "
     "and whose bandwidth is lower; its processor, another one, issues the update's Python loop"),
    ("lambda-.*(H100|H200|B200).*fp32", "speed", TF32),
    ("lambda-(3080|A4000)-L-fp32", "speed", LOOP),
    ("lambda-A5000-L-fp32", "speed", "out of line with its own card: in the same batches the large model is 4.8 times "
     "slower there than the base one, and 3.6 times on a Titan RTX"),
    ("lambda-(3090|4090)v1-", "speed", GEFORCE),
    ("lambda-.*fp16", "speed", APEX),
    ("nv(19|20)-v100-16-sq-fp32-b4", "speed", LOOP),
    ("hf-fp16", "speed", "transformers' AdamW is a Python loop as well, and waits for loss scaling's look at the "
     "gradients: none of it is hidden behind the backward pass"),
    ("nv20-a100-40-sq-tf32-b16", "speed", LOOP),
    ("nv19-v100-32-sq-fp16-b8", "speed", "out of line with its own table, in which a batch of 10 gives 46 samples/s"),
    ("nv19-v100-32-sq-fp32-b8", "speed", "out of line with the same source's later table, which has 12 samples/s"),
    ("nv21-a100-80-sq-", "speed", "out of line with the same source's table of a year before, in which a slower card "
     "gives more in fp16 (116 against 110.5 samples/s)"),
    ("neusight-h100-sxm5-80gb-bert_large-train-512-2", "speed", "of its 75 ms, 21 do not grow with the batch (four "
     "times as much takes 236): the host's launches, and cudaMalloc after the cache was emptied"),
    ("neusight-h100-sxm5-80gb-opt_13-train", "speed", "OPT's attention of transformers 4.38 clamps its scores "
     "(torch.max), forward and backward, which today's does not"),
    ("lambda-LambdaCloudA10040GBPCIev", "speed", "the PCIe card of 250 W is predicted as the SXM card of 400 W, whose "
     "data sheet says the same; the same source has it 9 to 12 % slower"),
    ("hf-bench-inf-128", "speed", "18 ms, the least of several: too short for the card's power to limit its clock, "
     "where the same source's 512 tokens are 3 % off"),
    ("lambda-(2080Ti|TitanRTX|V100)-", "memory", OF_2020),
    ("litgpt-(full|thunder)", "memory", LITGPT),
    ("gpt2grid-h100-nvl", "speed", "the source has it 10 % below its own H100 PCIe, whose data sheet says less"),
    ("raschka-gpt2-(8|9|10)", "speed", "by its script the loss is not compiled, and evaluations run inside the "
     "intervals that are timed"),
    ("raschka-gpt2-(8|9|10)", "memory", "by its script the loss is not compiled"),
    ("raschka-gpt2-", "memory", LOSS_16),
    ("ult-.*8b", "memory", LOSS_16),
    ("ult-", "speed", PADDED),
    ("fms-lora-powerlm", "speed", "no autocast there: peft's fp32 adapters multiply fp32 copies of their inputs, and "
     "full fine-tuning of the same model is as fast, which computes a third more"),
    ("torchao-llama2-1b-4090", "memory", "logits of 65,536 tokens in fp32 and their gradients alone take 17 of 19.5 "
     "GB: accumulation, or another loss, is not told"),
    ("flagperf-bert-large-hf", "memory", "published as 36 of 40 GB for a run that also evaluates, in batches of a size "
     "that is not published; the allocator keeps what those take"),
)
"""The first that fits counts. What is off for a reason that is not known has none."""


def reason(figure: str, row: Mapping[str, Any]) -> str:
    """The reason for a row's error in speed or memory; empty where it is not known."""
    return next((why for ids, what, why in REASONS if what == figure and re.match(ids, row["id"])), "")
