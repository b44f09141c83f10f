"""From text to token ids and back: the model's own tokenizer, a saved one, or a byte-level BPE trained on the data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.caching import files_digest
from tightfit.errors import DataError, one_line
from tightfit.system import cores
from tightfit.tasks import Array

END, PAD, MASK = "<|endoftext|>", "<pad>", "<mask>"
"""Special tokens of the tokenizers trained here."""

NAMES = {
    "eos_token": (END, "</s>", "<|end_of_text|>", "<eos>", "[SEP]"),
    "pad_token": (PAD, "[PAD]", "<|padding|>"),
    "mask_token": (MASK, "[MASK]"),
}
"""Usual names of the special tokens, for a `tokenizer.json` that comes alone."""

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with any of these holds a tokenizer."""

CHUNK = 32
"""Documents that a thread encodes at a time."""


class Tokenizer:
    """A tokenizer of transformers', as data and sampling use it.

    backend: the library's own. vocab_size: one more than the largest id. end_id: the token that ends a document.
    fingerprint: names everything that its output depends on.
    """

    def __init__(self, backend: Any, name: str) -> None:
        """Raises DataError for a tokenizer without a token to end a document with."""
        end = backend.eos_token_id if backend.eos_token_id is not None else backend.sep_token_id
        if end is None:
            raise DataError(f"tokenizer: {name} has neither an eos_token nor a sep_token to end a document with; "
                            "set one in its tokenizer_config.json")
        self.backend = backend
        self.end_id = int(end)
        self.pad_id: int | None = backend.pad_token_id
        self.mask_id: int | None = backend.mask_token_id
        self.vocab_size = 1 + max(backend.get_vocab().values())
        added = (number for number, token in backend.added_tokens_decoder.items() if token.special)
        self.special_ids = tuple(sorted({*backend.all_special_ids, *added}))
        with tempfile.TemporaryDirectory() as saved:
            self.save(Path(saved))
            files = sorted(path for path in Path(saved).rglob("*") if path.is_file())
            self.fingerprint = files_digest((path.relative_to(saved).as_posix(), path) for path in files)

    def encode_batch(self, texts: Sequence[str]) -> list[Array]:
        """The ids of each text (int64, 1-d) as a whole document: with the special tokens around it, `end_id` last."""

        def encode(part: Sequence[str]) -> list[Array]:
            return [np.array(ids if ids[-1:] == [self.end_id] else [*ids, self.end_id], dtype=np.int64)
                    for ids in self._ids(part)]

        # those written in Python hold the interpreter's lock, and keep state
        with own_threads():
            return in_threads(encode, texts) if self.backend.is_fast else encode(texts)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued: with nothing behind it."""
        (ids,) = self._ids([text])
        return ids[:-1] if ids[-1:] == [self.end_id] else ids

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with the special tokens that the tokenizer puts around it."""
        encoded = self.backend(list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` makes this tokenizer again."""
        self.backend.save_pretrained(str(folder))


@contextmanager
def own_threads() -> Iterator[None]:
    """Keep `tokenizers` from starting threads of its own, which make it warn in every process forked later."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def in_threads(encode: Callable[[Sequence[str]], list[Array]], texts: Sequence[str]) -> list[Array]:
    """`encode` over `texts`, in order, a chunk of them in each of as many threads as this process has cores."""
    chunks = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
    with ThreadPoolExecutor(cores()) as pool:
        return [ids for part in pool.map(encode, chunks) for ids in part]


def with_usual_names(backend: Any, name: str) -> Tokenizer:
    """A `tokenizers.Tokenizer` that comes without a configuration, its special tokens found by their usual names."""
    from transformers import PreTrainedTokenizerFast

    found = {role: next((token for token in names if backend.token_to_id(token) is not None), None)
             for role, names in NAMES.items()}
    special = {role: token for role, token in found.items() if token is not None}
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    return Tokenizer(whole, name)


def read_tokenizer_file(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`. Raises DataError for another file."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare exceptions
        raise DataError(f"tokenizer: {path} is not a tokenizer.json: {error}") from None
    return with_usual_names(backend, str(path))


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer in a folder or on the Hugging Face hub. Raises DataError where there is none."""
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the hub's client, its transport and remote code each raise their own
        raise DataError(f"tokenizer: {name!r} cannot be loaded: {one_line(error)}; write a folder with a tokenizer, or "
                        "tokenizer=train to train one on the data") from None
    return Tokenizer(backend, name)
