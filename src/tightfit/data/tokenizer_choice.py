"""Tokenizer choice: the recipe's, the model's own, or one trained on the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tightfit.data.caching import cached
from tightfit.data.corpora import is_path, missing_path
from tightfit.data.tokenizing import (
    END,
    MASK,
    OWN_FILES,
    PAD,
    Tokenizer,
    bare_tokenizer,
    load_tokenizer,
    no_tokenizers_parallelism,
    read_tokenizer_file,
)
from tightfit.errors import DataError, one_line
from tightfit.files import digest
from tightfit.model_facts import ModelFacts
from tightfit.models import GIVEN_MODULE, resolve_source
from tightfit.recipe import Data, Recipe
from tightfit.system import expanded
from tightfit.tasks import Task, get_task

TRAINING_CHARACTERS = 100_000_000
"""A tokenizer is trained on about this much text: the merges it learns hardly change beyond."""

WEIGHTS_ENDINGS = (".safetensors", ".bin")
"""Endings of files that hold a model's weights."""

MARKER = re.compile(r"<\|[^\s|<>]+\|>")
"""Pattern of chat templates' markers."""

LONG_RUNS = r"\S{256}|\s{256}"
"""Longer runs without a space, or of nothing but spaces, are cut for training, whose time grows with their square."""


def choose_tokenizer(
    recipe: Recipe, facts: ModelFacts, texts: Callable[[], Iterable[str]], fingerprint: str
) -> Tokenizer:
    """The recipe's tokenizer; `texts` are what to train one on, named by `fingerprint`.

    Raises DataError where it cannot be loaded, is larger than the model's vocabulary, or lacks what the task needs.
    """
    name = recipe.tokenizer
    if name == "auto":
        name = _models_own(recipe) or "train"
    tokenizer = _trained(recipe, facts, texts, fingerprint) if name == "train" else named_tokenizer(recipe, name)
    if tokenizer.vocab_size > facts.vocab_size:
        raise DataError(
            f"tokenizer: {name!r} has {tokenizer.vocab_size:,} tokens, more than the model's vocabulary of "
            f"{facts.vocab_size:,}; write vocab_size={tokenizer.vocab_size} or another tokenizer"
        )
    if get_task(recipe.task).predicts == "hidden" and tokenizer.mask_id is None:
        raise DataError(f"tokenizer: {name!r} has no mask token, which {recipe.task} needs; write tokenizer=train")
    return tokenizer


def _models_own(recipe: Recipe) -> str | None:
    """The folder or Hugging Face id of the model's own tokenizer, None where it has none."""
    if recipe.model == GIVEN_MODULE:
        raise DataError("tokenizer: a module given in Python comes without one; write tokenizer=<a folder or Hugging "
                        "Face id>, or tokenizer=train to train one on the data")
    source = resolve_source(recipe)
    if source.kind == "folder":
        folder = Path(source.name)
        if any((folder / file).is_file() for file in OWN_FILES):
            return source.name
        if recipe.pretrained and any(path.suffix in WEIGHTS_ENDINGS for path in folder.iterdir()):
            raise DataError(f"tokenizer: the model's folder {source.name} holds weights and no tokenizer, and one "
                            "trained on this data would not be theirs; write tokenizer=<a folder or Hugging Face id>, "
                            "or pretrained=false to start from random weights")
        return None
    return source.name if source.kind == "hub" else None


def named_tokenizer(recipe: Recipe, name: str) -> Tokenizer:
    """The tokenizer of that name: a `tokenizer.json`, a folder or a Hugging Face id.

    Raises DataError where there is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        whole = path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file()
        return load_tokenizer(str(path.parent), recipe.trust_remote_code) if whole else read_tokenizer_file(path)
    if path.is_dir():
        return load_tokenizer(str(path), recipe.trust_remote_code)
    if path.suffix == ".json" or is_path(name):
        raise missing_path("tokenizer", name, path)
    return load_tokenizer(name, recipe.trust_remote_code)


def special_tokens(task: Task, pad_id: int) -> list[str]:
    """The special tokens of a trained tokenizer, in the order of their ids.

    Padding stands at the id that the model knows as padding, where that can be, because some models read positions
    from it or never train its embedding. Where the next token is predicted, nothing looks at padding, and it has none.
    """
    if task.predicts == "next":
        return [END]
    others = [END, MASK] if task.predicts == "hidden" else [END]
    place = pad_id if pad_id <= len(others) else 0
    return [*others[:place], PAD, *others[place:]]


def chat_markers(data: Data) -> list[str]:
    """The markers of the recipe's chat template, such as `<|im_end|>`: a token each of a trained tokenizer."""
    found = dict.fromkeys(MARKER.findall(read_chat_template(data) or ""))
    return [marker for marker in found if marker not in (END, MASK, PAD)]


def read_chat_template(data: Data) -> str | None:
    """The recipe's chat template; None where it names none. Raises DataError for a file that cannot be read."""
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template: {data.chat_template!r} cannot be read: {one_line(error)}; write a file "
                        "with a Jinja template") from None


def _trained(recipe: Recipe, facts: ModelFacts, texts: Callable[[], Iterable[str]], fingerprint: str) -> Tokenizer:
    specials = [*special_tokens(get_task(recipe.task), facts.pad_token_id), *chat_markers(recipe.data)]
    key = digest(["byte-level BPE 4", fingerprint, str(facts.vocab_size), *specials])

    def fill(folder: Path) -> None:
        bare_tokenizer(train_bpe(texts(), facts.vocab_size, specials), "train").save(folder)

    folder = expanded(recipe.cache_dir) / "tokenizers" / key
    return cached(folder, fill, lambda made: read_tokenizer_file(made / "tokenizer.json"))


def train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str]) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of at most `vocab_size` tokens, the special ones first."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.Split(Regex(LONG_RUNS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
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
