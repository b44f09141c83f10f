"""Tokenizer choice: the recipe's, the model's own, or one trained on the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tightfit.data.caching import cached
from tightfit.data.corpora import is_path, missing_path
from tightfit.data.tokenizing import END, MASK, PAD, Tokenizer, load_tokenizer, read_tokenizer_file, train_bpe
from tightfit.errors import DataError, one_line
from tightfit.files import digest
from tightfit.model_facts import ModelFacts
from tightfit.models import GIVEN_MODULE, resolve_source
from tightfit.recipe import Data, Recipe
from tightfit.system import expanded
from tightfit.tasks import Task, get_task

OWN_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with any of these holds a tokenizer."""

WEIGHTS_ENDINGS = (".safetensors", ".bin")
"""Endings of files that hold a model's weights."""

MARKER = re.compile(r"<\|[^\s|<>]+\|>")
"""Pattern of chat templates' markers, such as `<|im_end|>`."""


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
    markers = MARKER.findall(read_chat_template(recipe.data) or "")  # of which each becomes one token
    specials = list(dict.fromkeys([*special_tokens(get_task(recipe.task), facts.pad_token_id), *markers]))
    key = digest(["byte-level BPE 4", fingerprint, str(facts.vocab_size), *specials])

    def fill(folder: Path) -> None:
        train_bpe(texts(), facts.vocab_size, specials).save(str(folder / "tokenizer.json"))

    folder = expanded(recipe.cache_dir) / "tokenizers" / key
    return cached(folder, fill, lambda made: read_tokenizer_file(made / "tokenizer.json"))
