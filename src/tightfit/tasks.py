"""Tasks that a model is trained for: the arrays of a micro-batch, and which of its labels count.

A task's loss is the sum of cross-entropy over the labels that count (those not `IGNORE`), computed from the logits.
Labels never reach the model, because a model's own loss cannot be normalized over a global batch of micro-batches.
Labels are aligned with logits: `labels[b, t]` is what `logits[b, t]` predicts, so nothing is shifted inside the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tightfit.model_facts import ModelFacts

IGNORE = -100
"""The label of a position that does not count."""

DOCUMENTS_A_ROW = 4
"""Documents that a plan, which reads no data, takes to share a packed row, and MFU as well. Their number costs a few
bytes; the time of attention hangs on their lengths."""

MaskKind = Literal["none", "padded", "packed"]
Array = np.ndarray
ArrayType = TypeVar("ArrayType")


@dataclass(frozen=True, kw_only=True)
class BatchOf(Generic[ArrayType]):
    """The arrays that one forward pass reads, of numpy or as tensors.

    inputs: the model's arguments by name, such as `input_ids` (B, T) int64 and, where positions restart,
        `position_ids` (B, T) int64; `pixel_values` (B, C, H, W) float32; `decoder_input_ids` (B, S) int64.
    labels: int64, (B, T) aligned with the logits, or (B,) for classification; `IGNORE` where nothing counts.
    mask: which positions may see each other, besides the model's own causality: every one (`none`), only real ones
        (`padded`, see `padding`), or only those of the same document (`packed`, see `document_ids`).
    padding: (B, T) bool, True on real tokens, which come first in a row; None where all are real.
    document_ids: (B, T) int32, equal within a document, rising along a row; only with mask `packed`.
    """

    inputs: dict[str, ArrayType]
    labels: ArrayType
    mask: MaskKind = "none"
    padding: ArrayType | None = None
    document_ids: ArrayType | None = None

    @property
    def padding_mask(self) -> ArrayType | None:
        """`padding`, where attention has to be kept from it."""
        return self.padding if self.mask == "padded" else None


@dataclass(frozen=True, kw_only=True)
class MicroBatch(BatchOf[Array]):
    """A micro-batch as arrays of numpy."""

    @property
    def samples(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Totals of a global batch, whatever its arrays are.

    count: number of labels that count, over all micro-batches; the loss is divided by it.
    tokens: number of real input positions (images: number of images).
    origin: where in the data it lies, for messages, such as "epoch 0, samples 7, 31, 4, 12".
    """

    count: int
    samples: int
    tokens: int
    origin: str = ""

    @property
    def totals(self) -> dict[str, Any]:
        """These fields by name."""
        return {"count": self.count, "samples": self.samples, "tokens": self.tokens, "origin": self.origin}


@dataclass(frozen=True, kw_only=True)
class GlobalBatch(BatchTotals):
    """The micro-batches of one global batch: what one optimizer step reads."""

    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array, and the range its integers are drawn from (low included, high not)."""

    shape: tuple[int, ...]
    dtype: str
    low: int = 0
    high: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Shapes and dtypes of a micro-batch: all that planning, and dummy data, need to know of the data."""

    inputs: dict[str, ArraySpec] = field(default_factory=dict)
    labels: ArraySpec
    mask: MaskKind = "none"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of training. `auto_class` is the transformers class that builds a model for it."""

    name: str
    auto_class: str
    predicts: Literal["next", "hidden", "target", "class"]
    """Meaning of the labels: each token's successor, the hidden tokens, another text's tokens, one class a sample."""
    reads: Literal["tokens", "images"] = "tokens"
    packs: bool = False
    """Whether documents may share a row."""
    peft_class: str | None = None
    peft_task: str | None = None
    """The class of peft that loads an adapter of it, and peft's name of the task; None where it has none."""

    @property
    def unit(self) -> str:
        """Unit of a run's speed."""
        return "tokens/s" if self.reads == "tokens" else "samples/s"

    @property
    def generates(self) -> bool:
        """Whether inference makes tokens one after another; else it is one forward pass."""
        return self.predicts in ("next", "target")

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields that a row of a tokenized data set must have."""
        inputs = "pixel_values" if self.reads == "images" else "input_ids"
        return (inputs,) if self.predicts == "next" else (inputs, "labels")

    def batch_spec(self, samples: int, seq_len: int, facts: ModelFacts, packed: bool = False) -> BatchSpec:
        """The micro-batch of `samples` sequences of `seq_len` tokens (or images of the model's own size)."""
        classes = ArraySpec((samples,), "int64", 0, facts.num_labels)
        if self.reads == "images":
            size = facts.image_size
            pixels = ArraySpec((samples, facts.num_channels, size, size), "float32")
            return BatchSpec(inputs={"pixel_values": pixels}, labels=classes)
        ids = ArraySpec((samples, seq_len), "int64", 0, facts.vocab_size)
        if self.predicts == "class":
            return BatchSpec(inputs={"input_ids": ids}, labels=classes)
        if self.predicts == "target":
            return BatchSpec(inputs={"input_ids": ids, "decoder_input_ids": ids}, labels=ids)
        if packed and self.packs:
            positions = ArraySpec((samples, seq_len), "int64", 0, seq_len)
            return BatchSpec(inputs={"input_ids": ids, "position_ids": positions}, labels=ids, mask="packed")
        return BatchSpec(inputs={"input_ids": ids}, labels=ids)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="causal-lm", auto_class="AutoModelForCausalLM", predicts="next", packs=True,
             peft_class="AutoPeftModelForCausalLM", peft_task="CAUSAL_LM"),
        Task(name="masked-lm", auto_class="AutoModelForMaskedLM", predicts="hidden", packs=True),
        Task(name="sequence-classification", auto_class="AutoModelForSequenceClassification", predicts="class",
             peft_class="AutoPeftModelForSequenceClassification", peft_task="SEQ_CLS"),
        Task(name="seq2seq", auto_class="AutoModelForSeq2SeqLM", predicts="target",
             peft_class="AutoPeftModelForSeq2SeqLM", peft_task="SEQ_2_SEQ_LM"),
        Task(name="image-classification", auto_class="AutoModelForImageClassification", predicts="class",
             reads="images"),
    )
}


def get_task(name: str) -> Task:
    """The task that a recipe names."""
    return TASKS[name]


def global_batch_of(micro_batches: tuple[MicroBatch, ...], origin: str = "") -> GlobalBatch:
    """Count what a global batch's micro-batches hold."""
    count = sum(int((m.labels != IGNORE).sum()) for m in micro_batches)
    tokens = 0
    for m in micro_batches:
        ids = m.inputs.get("input_ids")
        tokens += m.samples if ids is None else int(ids.size if m.padding is None else m.padding.sum())
    samples = sum(m.samples for m in micro_batches)
    return GlobalBatch(micro_batches=micro_batches, count=count, samples=samples, tokens=tokens, origin=origin)
