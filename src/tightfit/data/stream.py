"""Documents as one long run of token ids on disk, and where each of them begins."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.tasks import Array

TOKENS, STARTS, COUNTS = "tokens.npy", "starts.npy", "counts.npy"


class TokenStream:
    """Documents end to end, read from a folder that `write_stream` made. Pickles as the folder's name.

    tokens: uint16 or uint32 (tokens,). starts: int64 (documents + 1,), the last one being the number of tokens.
    counts: int64 (vocabulary,), how often each token occurs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStream, (self.folder,)

    @cached_property
    def tokens(self) -> Array:
        if self.starts[-1] == 0:
            return np.zeros(0, dtype=np.uint16)  # an empty file cannot be mapped
        return np.asarray(np.load(self.folder / TOKENS, mmap_mode="r"))

    @cached_property
    def starts(self) -> Array:
        return np.asarray(np.load(self.folder / STARTS))

    @cached_property
    def counts(self) -> Array:
        return np.asarray(np.load(self.folder / COUNTS))

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def __len__(self) -> int:
        return int(self.starts[-1])

    def check(self) -> None:
        """Open every file. Raises OSError, ValueError or EOFError for one that is missing or damaged."""
        if len(self.starts) < 1 or len(self.tokens) != self.starts[-1] or self.counts.ndim != 1:
            raise ValueError(f"{self.folder} holds another number of tokens than it states")

    def document(self, index: int, limit: int | None = None) -> Array:
        """The first `limit` tokens of a document, int64."""
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        if limit is not None:
            stop = min(stop, start + limit)
        return self.tokens[start:stop].astype(np.int64)


class StreamWriter:
    """Appends documents to a folder; `close` finishes its files."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.lengths: list[int] = []
        np.save(folder / TOKENS, np.zeros(0, dtype=self.dtype))

    def extend(self, documents: Iterable[Array]) -> None:
        """Append documents, each the ids (int64, 1-d) of one."""
        documents = list(documents)
        if not documents:
            return
        tokens = np.concatenate(documents)
        self.counts += np.bincount(tokens, minlength=len(self.counts))
        self.lengths += [len(d) for d in documents]
        with (self.folder / TOKENS).open("ab") as file:
            file.write(tokens.astype(self.dtype).tobytes())

    def close(self) -> None:
        """Finish the files. Without this call the folder is no stream."""
        starts = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=starts[1:])
        np.save(self.folder / STARTS, starts)
        np.save(self.folder / COUNTS, self.counts)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (int(starts[-1]),)}
        with (self.folder / TOKENS).open("r+b") as file:
            # numpy leaves room in the header for the length to grow, so that the tokens stay where they are.
            np.lib.format.write_array_header_1_0(file, header)


def unigram_loss(train: TokenStream, held_out: TokenStream, predicted_only: bool) -> float:
    """Nats per held-out token, predicted by how often each token occurs in training (add-one smoothed).

    predicted_only: leave out each document's first token, which a causal model never predicts.
    """
    counts = train.counts + 1
    costs = -np.log(counts / counts.sum())
    seen = held_out.counts.astype(np.float64)
    if predicted_only:
        firsts = held_out.tokens[held_out.starts[:-1]]
        seen -= np.bincount(firsts, minlength=len(seen))
    return float((seen * costs).sum() / max(seen.sum(), 1.0))
