"""Vocabularies padded to a round size, for the sake of the matrix kernels.

The added rows of the embedding and of the output layer are zero. No token reads them, and the caller cuts their
logits off (`logits[..., :vocab_size]`), so that they never win and never weigh in a softmax: they get no gradient.
The configuration keeps the real size, and a model is saved without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tightfit.errors import ModelError

BIAS_BUFFER = "final_logits_bias"
"""BART's bias on the logits: a buffer (1, vocabulary)."""

ROWS_BEFORE = "rows_before_padding"
"""Attribute of a padded model: the rows its vocabulary had."""


def pad_vocab(model: nn.Module, multiple: int, vocab_size: int) -> None:
    """Round the rows of the model's embedding, and of its output layer, up to a multiple, in place.

    The parameters are replaced wherever they are used, so that tied ones stay tied; build the optimizer afterwards.
    Raises ModelError for a model with no vocabulary of that size.
    """
    tables = _tables(model, vocab_size)
    before = max(t.shape[0] for t in tables)
    rows = -(-before // multiple) * multiple
    if rows == before:
        return
    replacements = {
        id(table): nn.Parameter(_with_rows(table.detach(), 0, rows), requires_grad=table.requires_grad)
        for table in tables
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in replacements:
                module._parameters[name] = replacements[id(parameter)]
                if isinstance(module, nn.Embedding):
                    module.num_embeddings = rows
                elif isinstance(module, nn.Linear):
                    module.out_features = rows
        bias = module._buffers.get(BIAS_BUFFER)
        if bias is not None:
            module._buffers[BIAS_BUFFER] = _with_rows(bias, 1, rows)
    setattr(model, ROWS_BEFORE, before)


def stored_tensors(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's state, as `state` has it, without the rows that only pad its vocabulary, for saving."""
    state = {**state}
    before = getattr(model, ROWS_BEFORE, None)
    if before is not None:
        padded = {id(table) for table in _vocabulary_parameters(model)}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in padded:
                state[name] = state[name][:before]
        for name in state:
            if name.rpartition(".")[2] == BIAS_BUFFER:
                state[name] = state[name][:, :before]
    return state


def _tables(model: nn.Module, vocab_size: int) -> list[nn.Parameter]:
    tables = _vocabulary_parameters(model)
    if not tables:
        raise ModelError(f"pad_vocab_to: {type(model).__name__} has no token embedding that can be found; give "
                         "it get_input_embeddings and get_output_embeddings, or write pad_vocab_to: null")
    wrong = [t.shape[0] for t in tables if t.shape[0] < vocab_size]
    if wrong:
        raise ModelError(f"pad_vocab_to: the vocabulary has {vocab_size} tokens, and {type(model).__name__}'s "
                         f"embedding {wrong[0]} rows; write vocab_size: {wrong[0]}")
    return tables


def _vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters with one row for each token: the embedding, the output layer and its bias, each once."""
    ends = [model_end(model, "get_input_embeddings"), model_end(model, "get_output_embeddings")]
    if not isinstance(ends[0], nn.Embedding):
        return []
    parameters = (p for module in ends if isinstance(module, nn.Module) for p in module._parameters.values())
    return list({id(p): p for p in parameters if p is not None}.values())


def model_end(model: nn.Module, getter: str) -> Any:
    """The model's input or output embedding, by the getter that transformers names; None where it has none."""
    answer: Callable[[], Any] = getattr(model, getter, lambda: None)
    try:
        return answer()
    except NotImplementedError:  # transformers: this model has no embedding of tokens
        return None


def _with_rows(table: Tensor, dim: int, rows: int) -> Tensor:
    """`table` with zeros behind its last row along `dim`."""
    missing = rows - table.shape[dim]
    return F.pad(table, (0, 0) * (table.dim() - 1 - dim) + (0, missing))
