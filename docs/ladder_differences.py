"""Why full-size predictions lie apart from published figures, by ladder and rung: a sentence for each difference of
more than 10 %, `time` and `memory` apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

What = Literal["time", "memory"]

CONTEXT = ("the published context with one tensor took 1,343 MiB, and today's, which is what "
           "is predicted, takes less: it loads kernels as they are first used")
FULL = f"{CONTEXT}; the rest is not explained, and the published card was nearly full"
SMALL = f"{CONTEXT}, which is most of the difference"
HALF = "the share of the tensor cores' peak that fp16 products reach was not measured on a V100"
SCAN = ("scan stacks what each layer keeps into one array; a loop does not, and the published bf16 rung without scan "
        "takes 8.8 GB")
SPEED = "the time model is not calibrated for this card, and the published step also spends time in scan's copies"
COMPILED = "the time model is not calibrated for this card, and torch.compile fuses other ops than XLA does"
LOGITS = "one micro-batch of 256 keeps its logits, their logarithms and their gradients in fp32"

DIFFERENCES: Mapping[str, Mapping[str, Mapping[What, str]]] = {
    "bert-large": {
        "batch 4, fp32": {"memory": FULL},
        "micro-batch 1, accumulation 4": {"memory": SMALL},
        "batch 4, fp16": {"memory": FULL, "time": HALF},
        "batch 4, Adafactor": {"memory": FULL},
        "accumulation, checkpointing, fp16, Adafactor": {"memory": SMALL},
        "batch 4, 8-bit AdamW": {"memory": FULL},
        "accumulation, checkpointing, fp16, 8-bit AdamW": {"memory": SMALL},
    },
    "transformer-156m": {
        "fp32": {"memory": SCAN, "time": SPEED},
        "bf16": {"memory": SCAN, "time": SPEED},
        "bf16, compiled": {"time": COMPILED},
        "bf16, compiled, checkpointing": {"time": COMPILED},
        "the same, 1 micro-batch": {"time": COMPILED},
        "the same, batch 256": {"memory": LOGITS},
    },
}
