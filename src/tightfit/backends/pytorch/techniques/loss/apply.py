"""The loss from hidden states and the head's weight, with no logits of a whole micro-batch.

The model's own forward pass ends in its head, a linear layer over the vocabulary. Here the head hands its input out,
and the loss is then made by calling the head once more: what runs there belongs to it, in a plan and in a profile. What
a model does to its logits is read from its configuration, and compared with its own on the first micro-batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.backends.pytorch.batch import TensorBatch, document_starts
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import is_out_of_memory
from tightfit.backends.pytorch.models import logits_of
from tightfit.backends.pytorch.padding import BIAS_BUFFER, model_end
from tightfit.backends.pytorch.simulated_device import simulated_device
from tightfit.backends.pytorch.techniques.loss.chunked_cross_entropy import (
    ChunkLoss,
    chunked_cross_entropy,
    computing_dtype,
    loss_of_chunk,
)
from tightfit.backends.pytorch.techniques.loss.of_logits import Compiler, HeadForward, Loss, Tally, far_logits
from tightfit.errors import ModelError, Refused, one_line
from tightfit.model_facts import text_config
from tightfit.tasks import IGNORE
from tightfit.techniques.loss import Chunked, Liger

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names in configurations of a softcap's bound: cap * tanh(logits / cap)."""
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Names of a factor of the logits."""
DIVISOR, MULTIPLIES = "logits_scaling", frozenset({"hyperclovax"})
"""Name of a divisor of the logits; and the model types that multiply by it."""

COMPARED_TOKENS = 8
"""Tokens whose logits are compared with the model's own."""


def chunked(technique: Chunked, build: Build) -> Build:
    """Our chunked cross-entropy."""
    head = find_head(build)
    tokens = technique.chunk(head.weight.shape[0])
    return replace(build, loss=LossOfHiddenStates(build, head, lambda hidden, weight: tokens))


def liger(technique: Liger, build: Build) -> Build:
    """Liger's Triton kernels; on fake tensors, which they cannot take, and to count what is predicted, our own in
    chunks of Liger's size."""
    head = find_head(build)
    if build.pads_vocabulary:
        raise Refused("loss: liger weighs the rows that pad the vocabulary; write loss=chunked, or pad_vocab_to=null")
    return replace(build, loss=LossOfHiddenStates(build, head, _liger_chunk, _liger_loss))


def _liger_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cap: float | None, smoothing: float
) -> Tensor:
    kernels: Any = importlib.import_module("liger_kernel.transformers")
    dtype = computing_dtype(hidden, weight)
    total = kernels.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum", softcap=cap,
                                                     label_smoothing=smoothing)
    loss: Tensor = total(weight.to(dtype), hidden.to(dtype), labels, None if bias is None else bias.to(dtype))
    return loss


def _liger_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Tokens of one of Liger's chunks, whose logits take about what the hidden states take."""
    pieces = -(-weight.shape[0] // weight.shape[1])
    return 1 << (-(-hidden.shape[0] // pieces) - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class LogitChange:
    """Logits of a model from its head's product: cap * tanh(factor * (product + bias) / cap) + added.

    factor: of hidden states and bias. cap: None for no softcap. added: a buffer (1, vocabulary) such as BART's.
    vocabulary: the rows of the head that count; those behind it only pad.
    """

    factor: float
    cap: float | None
    added: Tensor | None
    vocabulary: int


Chunk = Callable[[Tensor, Tensor], int]
"""(hidden states (N, H), the head's weight (V, H)) -> tokens of a chunk."""
Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, float | None, float], Tensor]
"""(hidden states, weight, bias (V,), labels (N,), bound of a softcap, smoothing) -> the summed loss."""


def find_head(build: Build) -> nn.Linear:
    """The model's output embedding, if it is a linear layer. Raises Refused naming the model and what to write."""
    name, head = type(build.model).__name__, model_end(build.model, "get_output_embeddings")
    if head is None:
        raise Refused(f"loss: {name} names no output embedding (get_output_embeddings), whose input this loss is made "
                      "of; write loss=plain")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise Refused(f"loss: the head of {name} is a {type(head).__name__}, and no linear layer of torch; write "
                      "loss=plain")
    return head


def read_change(build: Build, head: nn.Linear) -> LogitChange:
    """Logits as the model's configuration describes them."""
    config = text_config(getattr(build.model, "config", None))

    def number(name: str) -> float | None:
        value = getattr(config, name, None)
        return float(value) if isinstance(value, int | float) and value else None

    factor = next((found for found in map(number, FACTORS) if found), 1.0)
    divisor = number(DIVISOR) or 1.0
    factor *= divisor if getattr(config, "model_type", "") in MULTIPLIES else 1 / divisor
    added = next((b for m in build.model.modules() if (b := m._buffers.get(BIAS_BUFFER)) is not None), None)
    cap = next((found for found in map(number, CAPS) if found), None)
    if cap is not None and added is not None:
        raise Refused(f"loss: {type(build.model).__name__} adds a bias behind a softcap; write loss=plain")
    vocabulary = build.facts.vocab_size if build.pads_vocabulary else head.weight.shape[0]
    return LogitChange(factor=factor, cap=cap, added=added, vocabulary=vocabulary)


class LossOfHiddenStates(Loss):
    """The loss over the head's input, in chunks, or by a library's kernel of real tensors that counts nothing."""

    def __init__(self, build: Build, head: nn.Linear, chunk: Chunk, kernel: Kernel | None = None) -> None:
        self._head, self._chunk, self._kernel, self._change = head, chunk, kernel, read_change(build, head)
        self._loss_of: tuple[ChunkLoss, ChunkLoss] = loss_of_chunk, loss_of_chunk
        self._forward = HeadForward(head)
        head.forward = self._forward  # type: ignore[method-assign, assignment]

    def compiled(self, compiler: Compiler) -> Loss:
        self._loss_of = compiler(_evaluated_chunk), compiler(_learned_chunk)
        return self

    def outputs(self, build: Build, batch: TensorBatch) -> Tensor:
        hidden, _ = self._run(build, batch)
        return hidden

    def classes(self, build: Build, outputs: Tensor) -> int:
        return self._change.vocabulary

    def total(self, outputs: Tensor, labels: Tensor, tally: Tally | None = None, smoothing: float = 0.0) -> Tensor:
        def work(hidden: Tensor) -> Tensor:
            hidden, weight, bias = self._scaled(hidden.flatten(0, -2))
            change, flat = self._change, labels.flatten()
            if self._kernel is not None and tally is None and simulated_device(hidden) is None:
                return self._kernel(hidden, weight, bias, flat, change.cap, smoothing)
            return chunked_cross_entropy(hidden, weight, bias, flat, self._chunk(hidden, weight), change.cap,
                                         change.vocabulary, tally, smoothing, self._loss_of[torch.is_grad_enabled()])

        loss: Tensor = self._head(outputs, work)
        return loss

    def takes_input(self, module: nn.Module, arguments: int) -> bool:
        return module is self._head and self._forward.hands_out(arguments)

    @torch.no_grad()
    def check(self, build: Build, batch: TensorBatch) -> None:
        training = build.model.training
        build.model.eval()  # no dropout: the run's random stream is not touched
        try:
            eager = torch.compiler.set_stance("force_eager") if build.recipe.compiled else nullcontext()
            with eager, build.forward_context():
                hidden, output = self._run(build, _first_row(batch), COMPARED_TOKENS)
                logits = logits_of(output)
                trains_more = self._trains_behind(build, logits)
                torch.set_grad_enabled(False)  # the head had turned it on for what stands behind it
                expected = logits[..., : self._change.vocabulary]
                ours = self._head(hidden[:1, :COMPARED_TOKENS], self._logits)
                precise = computing_dtype(hidden, self._head.weight).itemsize >= 4
        finally:
            build.model.train(training)
        if ours.shape == expected.shape and not trains_more:
            near, tolerance = ours.shape[1] // 2, 1e-3 if precise else 3e-2
            pairs = zip(ours.double().tensor_split([near], dim=1), expected.double().tensor_split([near], dim=1),
                        strict=True)
            if all(torch.allclose(made, own, rtol=0.0, atol=tolerance * max(own.abs().max().item(), 1e-6))
                   for made, own in pairs if own.numel()):
                return
        raise ModelError(f"loss: {type(build.model).__name__} makes its logits otherwise than by a linear head, a "
                         "factor and a softcap that its configuration names; write loss=plain")

    def _run(self, build: Build, batch: TensorBatch, shown: int = 0) -> tuple[Tensor, Any]:
        """The head's input, (B, T, H), and what the model returned."""
        taken: list[Tensor] = []
        before = self._forward.taking.set((taken, shown))
        try:
            output = build.outputs(batch)
        except (RuntimeError, ValueError, IndexError) as error:
            if not taken or is_out_of_memory(error):
                raise
            raise ModelError(f"loss: {type(build.model).__name__} works on its logits as a whole: {one_line(error)}; "
                             "write loss=plain") from error
        finally:
            self._forward.taking.reset(before)
        if len(taken) != 1:
            raise ModelError(f"loss: {type(build.model).__name__} calls its head {len(taken)} times in a forward pass; "
                             "write loss=plain")
        return taken[0], output

    def _scaled(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias with the factor and what is added worked in."""
        bias: Tensor | None = self._head.bias
        change = self._change
        if change.factor != 1.0:
            hidden, bias = hidden * change.factor, None if bias is None else bias * change.factor
        if change.added is not None:
            added = change.added.flatten().to(self._head.weight.dtype)
            bias = added if bias is None else bias + added
        return hidden, self._head.weight, bias

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits, as the model's own should be of `far_logits`."""
        change, near = self._change, hidden.shape[1] // 2
        logits = nn.functional.linear(*self._scaled(hidden)).float()
        far = far_logits(logits)[:, near:] * change.factor + (0.0 if change.added is None else change.added)
        logits = torch.cat([logits[:, :near], far], dim=1)[..., : change.vocabulary]
        return logits if change.cap is None else change.cap * torch.tanh(logits / change.cap)

    def _trains_behind(self, build: Build, logits: Tensor) -> bool:
        """Whether weights behind the head are trained, such as a factor of its logits."""
        weights = [weight for weight in build.model.parameters() if weight.requires_grad]
        if not logits.requires_grad or not weights:
            return False
        return any(found is not None for found in torch.autograd.grad(logits.sum(), weights, allow_unused=True))


def _evaluated_chunk(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return loss_of_chunk(logits, labels, *rest)


def _learned_chunk(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Another function than evaluation's, for a compiler takes an argument's second value for one of many."""
    return loss_of_chunk(logits, labels, *rest)


def _first_row(batch: TensorBatch) -> TensorBatch:
    """The first sample of a micro-batch alone."""
    first = replace(batch, document_starts=None).map(lambda tensor: tensor[:1])
    if first.document_ids is None:
        return first
    starts = torch.from_numpy(document_starts(first.document_ids.cpu().numpy()))
    return replace(first, document_starts=starts.to(first.labels.device))
