"""A model of one's own, of which torch, transformers and tightfit know nothing."""

from __future__ import annotations

from torch import Tensor, nn


class Scores(nn.Module):
    """Logits of each token by itself, as a bare tensor: an embedding, and a linear layer behind it."""

    def __init__(self, vocabulary: int, width: int = 8) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(input_ids))
        return logits
