"""Cross-entropy over a vocabulary: from whole logits, or from hidden states and the head, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from tightfit.errors import install_command
from tightfit.tasks import TASKS
from tightfit.techniques.technique import Exactness, Positive, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

CHUNK_BYTES = 256 * 2**20
"""fp32 logits of an automatic chunk, at most: a small part of what a GPU has, for vocabularies of up to 130,000."""
FEWEST_TOKENS, MOST_TOKENS = 256, 4096
"""Tokens of an automatic chunk. Each chunk reads and writes the weight's gradient once, 8 bytes for 2 FLOPs a token:
below several hundred tokens that traffic, not the matrix product, sets the pace."""


class Loss(Technique):
    slot: ClassVar[str] = "loss"
    trains_only: ClassVar[bool] = True


@technique
class Plain(Loss):
    """Cross-entropy of the model's logits, which are whole: tokens times vocabulary, in several formats at once."""

    name: ClassVar[str] = "plain"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = ("the baseline: about 14 bytes a logit with mixed precision, kept or passing; 4 where "
                             "blocks are compiled")
    dominated_by: ClassVar = {"cpu": "chunked", "cuda": "chunked"}
    hf_unless: ClassVar = "use_liger_kernel"


@technique
class _FromHiddenStates(Loss):
    exact: ClassVar[Exactness] = "rounding"
    activation_share: ClassVar[float] = 0.6

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if TASKS[recipe.task].predicts == "class":
            yield f"{recipe.task} has few logits, and no output embedding; write loss=plain"


@technique
class Chunked(_FromHiddenStates):
    """Cross-entropy in chunks of tokens, from the hidden states and the head's weight: the loss and its gradients of
    one chunk's logits before the next chunk's are made, so that logits are never whole and no product is computed
    twice. The idea is Liger's and Cut Cross-Entropy's (Wijmans et al. 2024, arXiv 2411.09009)."""

    name: ClassVar[str] = "chunked"
    speed: ClassVar[str] = "about the same: the same matrix products, fewer passes over logits"
    memory: ClassVar[str] = "logits of one chunk; the gradient of the head's weight is there from the forward pass on"
    auto_on: ClassVar = ("pytorch",)

    tokens: Positive | Literal["auto"] = "auto"
    """Tokens of a chunk; auto is the power of two, from 256 to 4,096, whose logits take at most 256 MiB in fp32."""

    def chunk(self, vocabulary: int) -> int:
        """Tokens of a chunk."""
        if self.tokens != "auto":
            return self.tokens
        fits = max(CHUNK_BYTES // (4 * vocabulary), 1)
        return min(max(1 << (fits.bit_length() - 1), FEWEST_TOKENS), MOST_TOKENS)


@technique
class Liger(_FromHiddenStates):
    """Liger's fused linear cross-entropy: the same in Triton kernels (Hsu et al. 2024, arXiv 2410.10989). A plan takes
    `chunked` for it, with Liger's chunks."""

    name: ClassVar[str] = "liger"
    speed: ClassVar[str] = "about the same: one kernel for a chunk's loss and gradient"
    memory: ClassVar[str] = "as chunked, in chunks of about tokens times hidden size over vocabulary"
    auto_on: ClassVar = ()

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        if device.kind != "cuda":
            yield f"Liger's kernels need a CUDA device, which {device.name} is not; write loss=chunked"
        elif find_spec("liger_kernel") is None:
            yield (f"the library liger-kernel is not installed; run: {install_command('liger-kernel')}, or "
                   "write loss=chunked")
