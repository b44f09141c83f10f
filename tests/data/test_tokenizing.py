"""Tokenizers: trained, cached, loaded, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, NllbTokenizer

from tests.data.helpers import FACTS, recipe, texts
from tests.failing import failing
from tightfit.data.tokenizer_choice import choose_tokenizer, special_tokens
from tightfit.data.tokenizing import END, Tokenizer, load_tokenizer, read_tokenizer_file
from tightfit.errors import DataError
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

TEXTS = texts(60)


def trained(settings: Recipe, facts: ModelFacts = FACTS) -> Tokenizer:
    return choose_tokenizer(settings, facts, lambda: TEXTS, "some data")


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = trained(recipe(tmp_path))
    odd = ["", "naïve 東京 🙂\n\ttab", " leading and trailing ", "a\r\nb", *TEXTS]
    encoded = tokenizer.encode_batch(odd)
    assert [tokenizer.decode(ids) for ids in encoded] == odd
    assert all(ids.dtype == np.int64 and ids[-1] == tokenizer.end_id for ids in encoded)
    assert all((ids[:-1] != tokenizer.end_id).all() for ids in encoded)
    assert max(int(ids.max()) for ids in encoded) < tokenizer.vocab_size <= 400
    assert tokenizer.encode_prompt(odd[1]) == encoded[1][:-1].tolist()
    alone = tokenizer.encode_batch(odd[:2], ended=False)
    assert [ids.tolist() for ids in alone] == [[tokenizer.end_id], encoded[1][:-1].tolist()]
    assert np.array_equal(np.concatenate(encoded), np.concatenate([tokenizer.encode_batch([t])[0] for t in odd]))


def test_it_is_trained_once(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    first = trained(settings)
    never = failing(AssertionError("trained again"))
    again = choose_tokenizer(settings, FACTS, never, "some data")
    assert again.fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="trained again"):
        choose_tokenizer(settings, FACTS, never, "other data")
    with pytest.raises(AssertionError, match="trained again"):
        choose_tokenizer(settings, ModelFacts(vocab_size=399), never, "some data")


def test_training_is_deterministic(tmp_path: Path) -> None:
    one, two = (trained(recipe(tmp_path, cache_dir=str(tmp_path / name))) for name in "ab")
    assert one.fingerprint == two.fingerprint


def test_a_failed_training_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    with pytest.raises(DataError, match="unreadable"):
        choose_tokenizer(settings, FACTS, failing(DataError("unreadable")), "some data")
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []
    assert trained(settings).vocab_size > 256


@pytest.mark.parametrize(("task", "pad_id", "expected"), [
    ("causal-lm", 5, [END]),
    ("masked-lm", 0, ["<pad>", END, "<mask>"]),
    ("masked-lm", 1, [END, "<pad>", "<mask>"]),
    ("seq2seq", 1, [END, "<pad>"]),
    ("sequence-classification", 50256, ["<pad>", END]),
])  # fmt: skip
def test_special_tokens_stand_where_the_model_knows_padding(task: str, pad_id: int, expected: list[str]) -> None:
    assert special_tokens(get_task(task), pad_id) == expected


def test_a_masked_lm_gets_its_tokens(tmp_path: Path) -> None:
    tokenizer = trained(recipe(tmp_path, task="masked-lm"))
    assert (tokenizer.end_id, tokenizer.mask_id, tokenizer.special_ids) == (1, 2, (0, 1, 2))


def test_transformers_reads_what_was_saved(tmp_path: Path) -> None:
    ours = trained(recipe(tmp_path, task="masked-lm"))
    ours.save(tmp_path / "model")
    theirs = load_tokenizer(str(tmp_path / "model"), trust_remote_code=False)
    assert (theirs.end_id, theirs.backend.pad_token_id, theirs.mask_id) == (ours.end_id, 0, ours.mask_id)
    assert (theirs.vocab_size, theirs.special_ids) == (ours.vocab_size, ours.special_ids)
    for one, other in zip(ours.encode_batch(TEXTS), theirs.encode_batch(TEXTS), strict=True):
        assert np.array_equal(one, other)
    assert theirs.decode(theirs.encode_batch(["a b , c"])[0]) == "a b , c"
    assert theirs.encode_prompt("the dog") == ours.encode_prompt("the dog")


def test_a_models_own_tokenizer_is_taken(tmp_path: Path) -> None:
    model = tmp_path / "model"
    trained(recipe(tmp_path)).save(model)
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    never = failing(AssertionError("trained although the model has its own"))
    taken = choose_tokenizer(recipe(tmp_path, model=str(model)), FACTS, never, "anything")
    assert taken.decode(taken.encode_prompt("fox")) == "fox"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(AssertionError, match="although"):
        choose_tokenizer(recipe(tmp_path, model=str(model)), FACTS, never, "anything")


def test_special_tokens_around_a_document_are_kept(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["the dog", "dog"])] == [[2, 5, 6, 3], [2, 6, 3]]
    assert tokenizer.encode_batch(["the dog"], ended=False)[0].tolist() == [2, 5, 6, 3]
    assert (tokenizer.end_id, tokenizer.mask_id) == (3, 4)
    assert set(tokenizer.special_ids) == {0, 1, 2, 3, 4}
    assert tokenizer.encode_prompt("the dog") == [2, 5, 6]
    assert tokenizer.decode([2, 5, 6, 3]) == "the dog"


@pytest.mark.parametrize("ends_with_language", [False, True])
def test_targets_are_written_in_the_language_of_targets(tmp_path: Path, ends_with_language: bool) -> None:
    vocab = {word: place for place, word in enumerate(("<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b"))}
    theirs = NllbTokenizer(vocab, [], src_lang="en", tgt_lang="fr", additional_special_tokens=["en", "fr"],
                           legacy_behaviour=ends_with_language)
    theirs.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False)
    sources, targets = ["a", "ab"] * 80, ["b", "ba"] * 80
    for ours, given in ((tokenizer.encode_batch(sources), {"text": sources}),
                        (tokenizer.encode_batch(targets, target=True), {"text_target": targets})):
        assert [ids.tolist() for ids in ours] == theirs(**given)["input_ids"]
    marks = [{*ids.tolist()} & {*theirs.convert_tokens_to_ids(["en", "fr"])} for ids in (
        tokenizer.encode_batch(["a"])[0], tokenizer.encode_batch(["a"], target=True)[0])]
    assert marks == [{theirs.convert_tokens_to_ids("en")}, {theirs.convert_tokens_to_ids("fr")}]


def test_a_bare_tokenizer_file(tmp_path: Path) -> None:
    trained(recipe(tmp_path)).save(tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").unlink()
    named = choose_tokenizer(recipe(tmp_path, tokenizer=str(tmp_path / "t" / "tokenizer.json")), FACTS, list, "")
    assert named.decode(named.encode_prompt("fox")) == "fox"


def test_refusals(tmp_path: Path) -> None:
    trained(recipe(tmp_path)).save(tmp_path / "t")
    with pytest.raises(DataError, match=r"tokenizer: .* tokens, more than .* 100; write vocab_size=\d+ or another"):
        choose_tokenizer(recipe(tmp_path, tokenizer=str(tmp_path / "t")), ModelFacts(vocab_size=100), list, "")
    with pytest.raises(DataError, match="more than the model's vocabulary of 100"):  # fewer than there are bytes
        trained(recipe(tmp_path), ModelFacts(vocab_size=100))
    with pytest.raises(DataError, match="no mask token"):
        choose_tokenizer(recipe(tmp_path, task="masked-lm", tokenizer=str(tmp_path / "t")), FACTS, list, "")
    with pytest.raises(DataError, match=r"does not exist; did you mean 't'"):
        choose_tokenizer(recipe(tmp_path, tokenizer=str(tmp_path / "tt")), FACTS, list, "")
    with pytest.raises(DataError, match=r"does not exist"):  # as Windows writes paths
        choose_tokenizer(recipe(tmp_path, tokenizer=r"C:\no\where"), FACTS, list, "")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        read_tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="cannot be loaded"):
        choose_tokenizer(recipe(tmp_path, tokenizer=str(tmp_path / "nothing")), FACTS, list, "")


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*; write cache_dir="):
        trained(recipe(tmp_path, cache_dir=str(tmp_path / "file")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("setting", [None, "true"])
def test_a_later_fork_is_silent_and_does_not_hang(setting: str | None, tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from tests.data.helpers import FACTS, recipe, texts
from tightfit.data.tokenizer_choice import choose_tokenizer
tokenizer = choose_tokenizer(recipe(Path({str(tmp_path)!r})), FACTS, lambda: texts(200), "fork")
tokenizer.encode_batch(texts(200))
assert os.environ.get("TOKENIZERS_PARALLELISM") == {setting!r}
child = os.fork()
if child == 0:
    tokenizer.encode_batch(texts(200))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    if setting is not None:
        environment["TOKENIZERS_PARALLELISM"] = setting
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    try:
        _, errors = child.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the forked process too
        child.communicate()
        raise
    assert (child.returncode, errors) == (0, "")


def test_weights_without_their_tokenizer_are_refused(tmp_path):
    """Another tokenizer's ids would mean other tokens than those that the weights have learnt."""
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=400)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    settings = Recipe(model=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"holds weights and no tokenizer.*pretrained=false"):
        choose_tokenizer(settings, FACTS, lambda: TEXTS, "some data")
    assert choose_tokenizer(settings.override(pretrained=False), FACTS, lambda: TEXTS, "some data").vocab_size <= 400
