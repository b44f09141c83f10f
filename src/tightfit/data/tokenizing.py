"""From text to token ids and back: the model's own tokenizer, a saved one, or a byte-level BPE trained on the data."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tightfit.data.caching import files_digest
from tightfit.errors import DataError, one_line
from tightfit.files import digest, system_errors, write_atomically
from tightfit.system import cores
from tightfit.tasks import Array

GENERATION = "generation_config.json"
"""The file of a model's folder that says how it generates."""
END, PAD, MASK = "<|endoftext|>", "<pad>", "<mask>"
"""Special tokens of the tokenizers trained here."""

SPECIAL = {
    "eos_token": (END, "</s>", "<|end_of_text|>", "<eos>", "[SEP]"),
    "pad_token": (PAD, "[PAD]", "<|padding|>"),
    "mask_token": (MASK, "[MASK]"),
}
"""Usual names of the special tokens, for a `tokenizer.json` that comes alone."""

SIDES_SIZE = 12
"""Values of a token of a pair: whose it is (0 a special token's, 1 the first text's, 2 the second's), times 4, and its
token type, 0 where the tokenizer's models read none."""

CHUNK_DOCUMENTS = 32
"""Documents that a thread encodes at a time."""

TRAINING_CHARACTERS = 100_000_000
"""A tokenizer is trained on about this much text: the merges it learns hardly change beyond."""

LONG_RUNS = r"\S{256}|\s{256}"
"""Longer runs without a space, or of nothing but spaces, are cut for training, whose time grows with their square."""

Text = TypeVar("Text")
Encoded = TypeVar("Encoded")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer as data and sampling use it.

    backend: the library's own. vocab_size: one more than the largest id. end_id: the token that ends a document.
    fast: whether threads may encode at once. fingerprint: names everything that its output depends on.
    ids: of each text, with the special tokens that the tokenizer puts around it. offsets: of each text the ids, and
    where in it each token begins and ends; the flag asks for special tokens, which lie nowhere. save: writes into a
    folder the files from which `transformers.AutoTokenizer` makes it again. target_ids: as `ids`, of texts that others
    are turned into, where those are written otherwise, as in another language; never in several threads. pairs: of each
    pair of texts the ids with special tokens, and as many of `SIDES_SIZE` values.
    """

    backend: Any
    vocab_size: int
    end_id: int
    mask_id: int | None
    special_ids: tuple[int, ...]
    fast: bool
    fingerprint: str
    ids: Callable[[Sequence[str]], list[list[int]]]
    offsets: Callable[[Sequence[str], bool], list[tuple[list[int], list[tuple[int, int]]]]]
    pairs: Callable[[Sequence[tuple[str, str]]], list[tuple[list[int], list[int]]]]
    save: Callable[[Path], object]
    target_ids: Callable[[Sequence[str]], list[list[int]]] | None = None

    def encode_batch(self, texts: Sequence[str], *, ended: bool = True, target: bool = False) -> list[Array]:
        """The ids of each text (int64, 1-d) as a whole document: with the special tokens around it, and where it is to
        be `ended`, or holds no token, `end_id` last, or where the tokenizer puts it. target: whether other texts are
        turned into these."""
        ids_of = self.target_ids if target and self.target_ids is not None else self.ids

        def encode(part: Sequence[str]) -> list[Array]:
            return [np.array([*ids, self.end_id] if not ids or (ended and not self._ends(ids)) else ids, np.int64)
                    for ids in ids_of(part)]

        return in_threads(encode, texts, cores() if self.fast and ids_of is self.ids else 1)

    def encode_pairs(self, texts: Sequence[tuple[str, str]]) -> list[tuple[Array, Array]]:
        """The ids of each pair of texts, and whose each is: `pairs` as int64, 1-d."""
        found = in_threads(self.pairs, texts)
        return [(np.array(ids, np.int64), np.array(sides, np.int64)) for ids, sides in found]

    def _ends(self, ids: list[int]) -> bool:
        """Whether a document has its end: last, or in front of a special token such as its language's."""
        return ids[-1:] == [self.end_id] or (ids[-2:-1] == [self.end_id] and ids[-1] in self.special_ids)

    def encode_with_offsets(self, texts: Sequence[str], special: bool) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The `offsets` of each text. special: whether special tokens go around it."""
        return in_threads(lambda part: self.offsets(part, special), texts)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued: with nothing behind it."""
        (ids,) = self.ids([text])
        return ids[:-1] if ids[-1:] == [self.end_id] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))


def bare_tokenizer(backend: Any, name: str) -> Tokenizer:
    """A `tokenizers.Tokenizer`, trained here or read from a `tokenizer.json`: transformers, which imports torch, is not
    needed for it. Raises DataError where no token of it ends a document."""
    backend.no_padding()
    backend.no_truncation()
    found = {role: next((token for token in names if backend.token_to_id(token) is not None), None)
             for role, names in SPECIAL.items()}
    if found["eos_token"] is None:
        raise DataError(f"tokenizer: {name} has none of the tokens {', '.join(SPECIAL['eos_token'])} to end a document "
                        "with; name the folder that holds its tokenizer_config.json too")
    names = {role: token for role, token in found.items() if token is not None}
    role_ids = {role: backend.token_to_id(token) for role, token in names.items()}

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        end_id=role_ids["eos_token"],
        mask_id=role_ids.get("mask_token"),
        special_ids=tuple(sorted(i for i, t in backend.get_added_tokens_decoder().items() if t.special)),
        fast=True,
        fingerprint=digest([backend.to_str()]),
        ids=lambda texts: [list(encoding.ids) for encoding in backend.encode_batch_fast(list(texts))],
        offsets=lambda texts, special: [
            (list(e.ids), list(e.offsets)) for e in backend.encode_batch(list(texts), add_special_tokens=special)],
        pairs=lambda texts: [_sided(encoding, types=False) for encoding in backend.encode_batch(list(texts))],
        save=save,
    )


def _sided(encoding: Any, types: bool) -> tuple[list[int], list[int]]:
    """A `tokenizers.Encoding` of two texts as `pairs` has it. types: whether its token types are read."""
    sides = [4 * (0 if side is None else side + 1) for side in encoding.sequence_ids]
    return list(encoding.ids), [a + b for a, b in zip(sides, encoding.type_ids, strict=True)] if types else sides


@contextmanager
def no_tokenizers_parallelism() -> Iterator[None]:
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


def in_threads(
    encode: Callable[[Sequence[Text]], list[Encoded]], texts: Sequence[Text], threads: int | None = None
) -> list[Encoded]:
    """`encode` over `texts`, in order, a chunk of them at a time in each thread. threads: as many as this process has
    cores by default."""
    chunks = [texts[i : i + CHUNK_DOCUMENTS] for i in range(0, len(texts), CHUNK_DOCUMENTS)]
    with no_tokenizers_parallelism(), ThreadPoolExecutor(threads or cores()) as pool:
        return [ids for part in pool.map(encode, chunks) for ids in part]


def train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str]) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of at most `vocab_size` tokens, the special ones first."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.Split(Regex(LONG_RUNS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=byte_level.alphabet())
    with no_tokenizers_parallelism():
        backend.train_from_iterator(_enough(texts), trainer)
    backend.pre_tokenizer = byte_level
    end = (END, backend.token_to_id(END))
    backend.post_processor = processors.TemplateProcessing(pair=f"$A {END} $B", special_tokens=[end])
    return backend


def _enough(texts: Iterable[str]) -> Iterator[str]:
    """Texts until they sum to TRAINING_CHARACTERS."""
    total = 0
    for text in texts:
        if total >= TRAINING_CHARACTERS:
            return
        total += len(text)
        yield text


def read_tokenizer_file(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`. Raises DataError for another file."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare exceptions
        raise DataError(f"tokenizer: {path} is not a tokenizer.json: {error}") from None
    return bare_tokenizer(backend, str(path))


def name_end(model: Path, end_id: int, turn_end: int | None) -> None:
    """Write into a saved model's configurations what ends a text, where they name nothing, and beside it what ends a
    turn of the conversations that it learned from: what generates with it stops there."""
    for name in ("config.json", GENERATION):
        try:
            values = json.loads((model / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        named = values.get("eos_token_id")
        ids = list(named) if isinstance(named, list) else [end_id if named is None else named]
        ids += [] if turn_end is None or turn_end in ids else [turn_end]
        if ids not in (named, [named]):
            values["eos_token_id"] = ids if len(ids) > 1 else ids[0]
            write_atomically(model / name, json.dumps(values, indent=2) + "\n")


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer in a folder or on the Hugging Face hub. Raises DataError where there is none."""
    from transformers import AutoTokenizer

    from tightfit.hub import only_local

    try:
        backend = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code,
                                                local_files_only=only_local(name))
    except Exception as error:  # the hub's client, its transport and remote code each raise their own
        raise DataError(f"tokenizer: {name!r} cannot be loaded: {one_line(error)}; write a folder with a tokenizer, or "
                        "tokenizer=train to train one on the data") from None
    end = backend.eos_token_id if backend.eos_token_id is not None else backend.sep_token_id
    if end is None:
        raise DataError(f"tokenizer: {name} has neither an eos_token nor a sep_token to end a document with; "
                        "set one in its tokenizer_config.json")
    with tempfile.TemporaryDirectory() as saved, system_errors():
        backend.save_pretrained(saved)
        files = sorted(path for path in Path(saved).rglob("*") if path.is_file())
        fingerprint = files_digest((path.relative_to(saved).as_posix(), path) for path in files)
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}

    def offsets(texts: Sequence[str], special: bool) -> list[tuple[list[int], list[tuple[int, int]]]]:
        if not backend.is_fast:
            raise DataError(f"tokenizer: {name} does not say where in a text its tokens lie, which learning a part of "
                            "it needs; write tokenizer=<one with a tokenizer.json>")
        found = backend(list(texts), add_special_tokens=special, return_offsets_mapping=True, **options)
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def pairs(texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        if not backend.is_fast:
            raise DataError(f"tokenizer: {name} does not say which token is of which text, which data.text_pair needs; "
                            "write tokenizer=<one with a tokenizer.json>")
        types = "token_type_ids" in backend.model_input_names
        firsts, seconds = zip(*texts, strict=True)
        return [_sided(encoding, types) for encoding in backend(firsts, seconds, verbose=False).encodings]

    def target_ids(texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in backend(text_target=list(texts), **options)["input_ids"]]

    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab().values()),
        end_id=int(end),
        mask_id=backend.mask_token_id,
        special_ids=tuple(sorted(set(backend.all_special_ids))),
        fast=backend.is_fast,  # those written in Python hold the interpreter's lock, and keep state
        fingerprint=fingerprint,
        ids=lambda texts: [list(ids) for ids in backend(list(texts), **options)["input_ids"]],
        offsets=offsets,
        pairs=pairs,
        save=backend.save_pretrained,
        target_ids=target_ids if hasattr(backend, "_switch_to_target_mode") else None,
    )
