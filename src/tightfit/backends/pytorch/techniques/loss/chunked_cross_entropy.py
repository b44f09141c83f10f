"""Cross-entropy of a linear head in chunks of tokens, in plain ATen ops: forward and gradients at once.

One chunk's logits are made, become the loss and, in their place, their own gradient, and are gone before the next
chunk's. Three matrix products a chunk, as many as whole logits take; nothing is computed twice. What waits for the
backward pass is the gradient of the hidden states and that of the weight, for a loss of weight 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.backends.pytorch import loops
from tightfit.backends.pytorch.simulated_device import simulated_cuda_device
from tightfit.backends.pytorch.techniques.loss.of_logits import Tally
from tightfit.tasks import IGNORE


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tokens: int, cap: float | None = None,
    vocabulary: int | None = None, tally: Tally | None = None, smoothing: float = 0.0,
    loss_of: ChunkLoss | None = None,
) -> Tensor:  # fmt: skip
    """Summed cross-entropy of `hidden @ weight.T + bias`, a scalar in fp32, or in fp64 for fp64.

    hidden: (N, H). weight: (V, H). bias: (V,). labels: int64 (N,), `IGNORE` where nothing counts. tokens: rows of a
    chunk, at most; all chunks are equally long. cap: of a softcap, cap * tanh(logits / cap). vocabulary: rows of the
    weight that count; those behind it take no part. tally: counts what is predicted, where nothing is learned.
    smoothing: share of each label that is spread over all classes. loss_of: `loss_of_chunk` compiled. Under autocast
    products run in its format.
    """
    learns = torch.is_grad_enabled()
    total: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, tokens, cap, vocabulary, learns, tally, smoothing, loss_of or loss_of_chunk)
    return total


def computing_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The format in which a linear layer multiplies them."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tokens: int, cap: float | None,
        vocabulary: int | None, learns: bool, tally: Tally | None, smoothing: float, loss_of: ChunkLoss,
    ) -> Tensor:  # fmt: skip
        needs = [learns and need for need in ctx.needs_input_grad[:3]]
        dtype = computing_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = _Chunks(hidden, weight, bias, dtype, cap, vocabulary, needs, tally, smoothing, loss_of)
            starts, size = loops.equal_turns(hidden.shape[0], tokens)
            for start in loops.turns(starts):
                chunks.add(start, hidden[start : start + size].to(dtype), labels[start : start + size])
        if any(needs):
            ctx.formats = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
            ctx.save_for_backward(*chunks.gradients())
        return chunks.loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if saved is None else saved.mul_(gradient).to(dtype)
                 for saved, dtype in zip(ctx.saved_tensors, ctx.formats, strict=True)]
        return (*found, *[None] * 8)


def loss_of_chunk(
    logits: Tensor, labels: Tensor, cap: float | None, vocabulary: int, smoothing: float = 0.0,
    dtype: torch.dtype | None = None, bias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Summed cross-entropy of logits (n, V) and labels (n,), a scalar in fp32 or wider; where a format is given, the
    logits' gradient in it, (n, V), rows that do not count included, and with `bias` its sum over those that do, (V,).

    The eager ops work in place, and keep no more than two arrays of logits and the softcap's slope. Compiled, logits
    are read twice and their gradient is written once.
    """
    compiles = torch.compiler.is_compiling()
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    slope = None
    if cap is not None:
        slope = logits / cap if compiles else logits.div_(cap)
        slope = slope.tanh() if compiles else slope.tanh_()
        logits = slope * cap
    padding = vocabulary < logits.shape[1]  # whole rows, so that the products stay aligned
    if padding and compiles:
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= vocabulary, -torch.inf)
    elif padding:
        logits[:, vocabulary:] = -torch.inf
    shares = logits.log_softmax(-1)
    del logits
    own, each = 1.0 - smoothing, smoothing / vocabulary  # weights of the label, and of every class
    counted = labels != IGNORE
    loss = own * F.nll_loss(shares, labels, ignore_index=IGNORE, reduction="sum")
    if each:
        loss -= each * shares[:, :vocabulary].sum(-1).masked_fill(~counted, 0.0).sum()
    if dtype is None:
        return loss, None, None
    shares, chosen = shares.exp_(), labels.clamp(min=0)[:, None]
    if compiles:  # one pass over all, where a scatter would be another
        shares = shares - own * (torch.arange(shares.shape[1], device=labels.device) == chosen)
    else:
        shares.scatter_add_(1, chosen, shares.new_full((len(labels), 1), -own))
    if each:
        shares[:, :vocabulary].sub_(each)
    if slope is not None:
        shares.mul_(slope.square_().neg_().add_(1.0))
        del slope
    return loss, shares.to(dtype), torch.mv(shares.t(), counted.to(shares.dtype)) if bias else None


ChunkLoss = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
"""`loss_of_chunk`, as it is or compiled."""


class _Chunks:
    """The sums over chunks."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, cap: float | None,
        vocabulary: int | None, needs: list[bool], tally: Tally | None, smoothing: float, loss_of: ChunkLoss,
    ) -> None:
        self._matrix = weight.to(dtype)
        self._offset = None if bias is None else bias.to(dtype)
        self._cap, self._vocabulary = cap, vocabulary or weight.shape[0]
        self._of_hidden = torch.empty_like(hidden, dtype=dtype) if needs[0] else None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None
        self._needs, self._tally, self._smoothing, self._loss = needs, tally, smoothing, loss_of
        # Sums over many chunks need fp32. Where there are fewer tokens than hidden units there are few chunks, and a
        # wider sum might take more than whole logits would.
        many = hidden.shape[0] >= hidden.shape[1]
        self._wide = torch.promote_types(weight.dtype, torch.float32) if many else weight.dtype
        self.loss = hidden.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))

    def add(self, start: int, hidden: Tensor, labels: Tensor) -> None:
        """One chunk: hidden (n, H) in the computing format, labels (n,)."""
        if not any(self._needs):
            logits = self._logits(hidden)
            if self._tally is not None:
                self._tally(logits[:, : self._vocabulary], labels)
            self.loss += self._loss(logits, labels, self._cap, self._vocabulary)[0]
            return
        loss, gradient, of_bias = self._loss(
            self._logits(hidden), labels, self._cap, self._vocabulary, self._smoothing, hidden.dtype, self._needs[2])
        assert gradient is not None
        self.loss += loss
        if of_bias is not None:
            self._of_bias = of_bias if self._of_bias is None else self._of_bias.add_(of_bias)
        uncounted = (labels == IGNORE)[:, None]
        if self._of_hidden is not None:
            part = self._of_hidden[start : start + len(labels)]
            torch.mm(gradient, self._matrix, out=part)
            part.masked_fill_(uncounted, 0.0)
        if self._needs[1]:
            self._add_product(gradient.t(), hidden.masked_fill(uncounted, 0.0))

    def _logits(self, hidden: Tensor) -> Tensor:
        transposed = self._matrix.t()
        return hidden @ transposed if self._offset is None else torch.addmm(self._offset, hidden, transposed)

    def _add_product(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add a chunk's share of the weight's gradient, (V, n) by (n, H)."""
        same = gradient.dtype == self._wide
        on_cuda = gradient.is_cuda or simulated_cuda_device(gradient) is not None
        if self._of_weight is None:
            if same or not on_cuda:
                self._of_weight = (gradient @ hidden).to(self._wide)
            else:
                self._of_weight = torch.mm(gradient, hidden, out_dtype=self._wide)
        elif same:
            self._of_weight.addmm_(gradient, hidden)
        elif on_cuda:  # in one kernel, which a CPU does not have
            torch.addmm(self._of_weight, gradient, hidden, out_dtype=self._wide, out=self._of_weight)
        else:
            self._of_weight.add_(gradient @ hidden)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias."""
        return self._of_hidden, self._of_weight, self._of_bias
