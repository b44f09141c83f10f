"""From text to token ids and back: the model's own tokenizer, a saved one, or a byte-level BPE trained on the data."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tightfit.data.caching import digest, files_digest
from tightfit.errors import DataError, MissingLibrary
from tightfit.system import cores
from tightfit.tasks import Array

END, PAD, MASK = "<|endoftext|>", "<pad>", "<mask>"
"""Special tokens of the tokenizers trained here."""

END_NAMES = (END, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
PAD_NAMES = (PAD, "[PAD]", "<|padding|>")
MASK_NAMES = (MASK, "[MASK]")
"""What the special tokens are called in a `tokenizer.json` that comes alone."""

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with any of these holds a tokenizer."""

CHUNK = 32
"""Documents that a thread encodes at a time."""


class Tokenizer(Protocol):
    """What data and sampling need of a tokenizer. `fingerprint` names everything that its output depends on."""

    vocab_size: int
    """One more than the largest id."""
    end_id: int
    """The token that ends a document."""
    pad_id: int | None
    mask_id: int | None
    special_ids: tuple[int, ...]
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> list[Array]:
        """The ids of each text (int64, 1-d) as a whole document: with the special tokens around it, `end_id` last."""

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued: with nothing behind it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""

    def save(self, folder: Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` makes this tokenizer again."""


class FastTokenizer:
    """A `tokenizers.Tokenizer`, trained here or read from a `tokenizer.json`."""

    def __init__(self, backend: Any, name: str) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._names: dict[str, str] = {}
        end = self._find("eos_token", END_NAMES)
        if end is None:
            raise DataError(f"tokenizer: {name} has none of the tokens {', '.join(END_NAMES)} to end a document with; "
                            "name the folder that holds its tokenizer_config.json too")  # fmt: skip
        self.end_id = end
        self.pad_id = self._find("pad_token", PAD_NAMES)
        self.mask_id = self._find("mask_token", MASK_NAMES)
        self.special_ids = tuple(sorted(i for i, t in backend.get_added_tokens_decoder().items() if t.special))
        self.fingerprint = digest([backend.to_str()])

    def _find(self, role: str, names: Sequence[str]) -> int | None:
        for name in names:
            found = self.backend.token_to_id(name)
            if found is not None:
                self._names[role] = name
                return int(found)
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[Array]:
        def encode(part: Sequence[str]) -> list[Array]:
            return [_ended(e.ids, self.end_id) for e in self.backend.encode_batch_fast(list(part))]

        with own_threads():
            return in_threads(encode, texts)

    def encode_prompt(self, text: str) -> list[int]:
        return _unended(self.backend.encode(text).ids, self.end_id)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self._names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class PretrainedTokenizer:
    """A tokenizer of transformers', of either kind."""

    def __init__(self, backend: Any, name: str) -> None:
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab().values())
        end = backend.eos_token_id if backend.eos_token_id is not None else backend.sep_token_id
        if end is None:
            raise DataError(f"tokenizer: {name} has neither an eos_token nor a sep_token to end a document with; "
                            "set one in its tokenizer_config.json")  # fmt: skip
        self.end_id = int(end)
        self.pad_id: int | None = backend.pad_token_id
        self.mask_id: int | None = backend.mask_token_id
        self.special_ids = tuple(sorted(set(backend.all_special_ids)))
        self.fingerprint = _saved_digest(self)

    def encode_batch(self, texts: Sequence[str]) -> list[Array]:
        def encode(part: Sequence[str]) -> list[Array]:
            encoded = self.backend(list(part), return_attention_mask=False, return_token_type_ids=False, verbose=False)
            return [_ended(ids, self.end_id) for ids in encoded["input_ids"]]

        with own_threads():
            # Those written in Python hold the interpreter's lock, and keep state while they encode.
            return in_threads(encode, texts) if self.backend.is_fast else encode(texts)

    def encode_prompt(self, text: str) -> list[int]:
        return _unended(self.backend(text, verbose=False)["input_ids"], self.end_id)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self.backend.save_pretrained(str(folder))


def _saved_digest(tokenizer: Tokenizer) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder)
        return files_digest((p.relative_to(folder).as_posix(), p) for p in sorted(folder.rglob("*")) if p.is_file())


def _ended(ids: list[int], end_id: int) -> Array:
    return np.array(ids if ids and ids[-1] == end_id else [*ids, end_id], dtype=np.int64)


def _unended(ids: list[int], end_id: int) -> list[int]:
    return ids[:-1] if ids and ids[-1] == end_id else list(ids)


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
    threads = min(cores(), len(chunks))
    if threads < 2:
        return [ids for chunk in chunks for ids in encode(chunk)]
    with ThreadPoolExecutor(threads) as pool:
        return [ids for part in pool.map(encode, chunks) for ids in part]


def read_tokenizer_file(path: Path) -> FastTokenizer:
    """The tokenizer in a `tokenizer.json`. Raises DataError for another file."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare exceptions
        raise DataError(f"tokenizer: {path} is not a tokenizer.json: {error}") from None
    return FastTokenizer(backend, str(path))


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer in a folder or on the Hugging Face hub. Raises DataError where there is none."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingLibrary("transformers", f"tokenizer: {name}", "transformers") from None
    try:
        backend = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the hub's client, its transport and remote code each raise their own
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"tokenizer: {name!r} cannot be loaded: {reason}; write a folder with a tokenizer, or "
                        "tokenizer=train to train one on the data") from None  # fmt: skip
    return PretrainedTokenizer(backend, name)
