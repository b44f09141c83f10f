"""What a recipe's `model` names, the configuration it stands for, and the sentences for what is wrong with it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from huggingface_hub import errors as hub_errors

from tightfit.bundled import BUNDLED, HUB_NAMES, bundled_family, bundled_shape
from tightfit.errors import ModelError
from tightfit.hub import explain_hub_error, only_local
from tightfit.model_facts import facts_of, model_facts, module_facts
from tightfit.models import ModelSource, TransformerConfig, read_config, resolve_source
from tightfit.recipe import Recipe


def recipe(model: str, **values: Any) -> Recipe:
    return Recipe.from_dict({"model": model, **values})


def write_config(folder: Path, **values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(("name", "kind"), [
    ("gpt2", "bundled"), ("transformer-156m", "bundled"), ("openai-community/gpt2", "hub"),
    ("bert-base-uncased", "hub"), ("my_package.models:make", "factory"), ("models:Outer.inner", "factory"),
])
def test_sources(name: str, kind: str) -> None:
    assert resolve_source(recipe(name)) == ModelSource(kind, name)


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    name = write_config(tmp_path / "saved", model_type="gpt2")
    assert resolve_source(recipe(name)) == ModelSource("folder", name)


@pytest.mark.parametrize(("name", "says"), [
    ("gpt2-mediun", "model: 'gpt2-mediun' is not a bundled model .did you mean 'gpt2-medium'"),
    ("llama-3.1-8", "did you mean 'llama-3.1-8b'"),
    ("a-b-c", "choose from: bert-base, .*Hugging Face id such as .*package.module:factory"),
    ("./nowhere", "'./nowhere' is not a folder"),
    ("/no/where/at/all", "is not a folder"),
    (r"C:\no\where", "is not a folder"),
])
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        resolve_source(recipe(name))


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_source(recipe(str(tmp_path)))


@pytest.mark.parametrize("name", ["openai/whisper-small", "whisper-large-v3", "whisper"])
def test_a_model_of_sound_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match="reads sound, and no task here does"):
        resolve_source(recipe(name))


def test_a_folder_with_a_model_of_sound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="reads sound, and no task here does"):
        read_config(recipe(write_config(tmp_path / "mine", model_type="whisper")))
    assert resolve_source(recipe("me/whispering-llama")).kind == "hub"


@pytest.mark.parametrize(("name", "like"), [
    ("Qwen/Qwen3-8B-Base", "qwen3-8b"), ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
    ("google/vit-base-patch16-224", "vit-base"), ("google/gemma-3-27b-it", "gemma-3-27b"), ("microsoft/phi-4", "phi-4"),
    ("openai-community/gpt2-large", "gpt2-large"), ("openai-community/gpt2", "gpt2"), ("someone/gpt2-tiny", None),
    ("microsoft/Phi-4-mini-instruct", None), ("google/gemma-3-270m", None), ("no-one/nothing", None),
])
def test_the_bundled_shape_of_a_hub_id(name: str, like: str | None) -> None:
    assert bundled_shape(name) == like


def test_the_bundled_family_of_a_hub_id() -> None:
    assert bundled_family("Qwen/Qwen2.5-3B") == [f"qwen2.5-{size}b" for size in ("0.5", "1.5", "7", "14", "32")]
    assert bundled_family("google/gemma-3-270m")[0] == "gemma-3-1b"
    assert bundled_family("no-one/nothing") == []


def test_no_bundled_name_hides_a_hub_name() -> None:
    assert not HUB_NAMES & BUNDLED.keys()


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_shape_states_fields_of_its_class(name: str) -> None:
    """A misspelt field would be kept without a word, and the class's default used."""
    config = read_config(recipe(name, task=BUNDLED[name].task))
    undeclared = {"num_labels", "decoder_start_token_id", "head_dim"}  # which transformers keeps for every class
    for field, value in BUNDLED[name].numbers.items():
        assert field in undeclared or field in type(config).__dataclass_fields__
        stated = getattr(config, field)
        assert stated == value or (field == "rope_parameters" and value.items() <= stated.items())


@pytest.mark.parametrize(("name", "values", "expected"), [
    ("gpt2", {}, {"vocab_size": 50257, "max_positions": 1024, "pad_token_id": 50256}),
    ("gpt2", {"vocab_size": 300}, {"vocab_size": 300, "pad_token_id": 0}),
    ("bert-base", {"task": "sequence-classification", "num_labels": 7}, {"num_labels": 7, "max_positions": 512}),
    ("roberta-base", {"task": "masked-lm"}, {"max_positions": 512, "pad_token_id": 1}),
    ("t5-small", {"task": "seq2seq"}, {"max_positions": None, "decoder_start_token_id": 0, "vocab_size": 32128}),
    ("llama-3.1-8b", {}, {"vocab_size": 128256, "max_positions": 131072}),
    ("vit-base", {"task": "image-classification"}, {"image_size": 224, "num_channels": 3, "num_labels": 1000}),
    ("vit-base", {"task": "image-classification", "model_overrides": {"image_size": 32}, "num_labels": 10},
     {"image_size": 32, "num_labels": 10}),
    ("transformer-156m", {}, {"vocab_size": 2048, "max_positions": 512}),
    ("my.models:make", {"vocab_size": 99}, {"vocab_size": 99, "max_positions": None}),
    ("my.models:make", {"task": "image-classification", "num_labels": 5}, {"image_size": 224, "num_labels": 5}),
])
def test_facts(name: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    facts = model_facts(recipe(name, **values))
    assert {field: getattr(facts, field) for field in expected} == expected


@pytest.mark.parametrize("name", ["CLIPConfig", "SiglipConfig"])
def test_images_are_of_the_size_that_the_part_for_them_states(name: str, tmp_path: Path) -> None:
    getattr(transformers, name)(vision_config={"image_size": 32, "num_channels": 1}).save_pretrained(tmp_path)
    facts = model_facts(recipe(str(tmp_path), task="image-classification"))
    assert (facts.image_size, facts.num_channels) == (32, 1)


def test_facts_of_a_module() -> None:
    module = SimpleNamespace(config=SimpleNamespace(vocab_size=70, max_position_embeddings=12))
    facts = module_facts(module, recipe("gpt2"))
    assert (facts.vocab_size, facts.max_positions) == (70, 12)
    with pytest.raises(ModelError, match=r"vocab_size: SimpleNamespace has no configuration.*; write vocab_size"):
        module_facts(SimpleNamespace(), recipe("gpt2"))


@pytest.mark.parametrize(("top", "decoder", "expected"), [
    ({"decoder_start_token_id": 101, "pad_token_id": 3}, {"pad_token_id": 0, "bos_token_id": 5}, (101, 3)),
    ({}, {"pad_token_id": 7, "decoder_start_token_id": 6}, (6, 7)),
    ({}, {"pad_token_id": 7, "bos_token_id": 5}, (5, 7)),  # as transformers generates, and T5Gemma shifts
    ({}, {"pad_token_id": 7}, (7, 7)),
], ids=str)
def test_the_first_token_of_a_decoder(top: dict[str, int], decoder: dict[str, int], expected: tuple[int, int]) -> None:
    import transformers

    whole = transformers.EncoderDecoderConfig(
        encoder={"model_type": "bert"}, decoder={"model_type": "bert", "vocab_size": 200, **decoder}, **top)
    facts = facts_of(whole, recipe("bert-base", task="seq2seq"))
    assert (facts.decoder_start_token_id, facts.pad_token_id, facts.vocab_size) == (*expected, 200)


def test_overrides_and_the_fields_that_follow_from_them() -> None:
    config = read_config(recipe("llama-3.1-8b", model_overrides={"hidden_size": 64, "num_hidden_layers": 3}))
    assert (config.num_hidden_layers, config.head_dim, config.intermediate_size) == (3, 2, 14336)
    config = read_config(recipe("gpt2", model_overrides={"num_hidden_layers": 4}))  # a common name for n_layer
    assert config.n_layer == 4


def test_a_changed_vocabulary_drops_the_special_tokens_it_does_not_have() -> None:
    config = read_config(recipe("gpt2", vocab_size=300))
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (300, None, None)
    config = read_config(recipe("bert-base", task="masked-lm", vocab_size=300))
    assert config.pad_token_id == 0


def test_a_folders_layer_list_follows_the_depth(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    name = write_config(tmp_path / "saved", model_type="qwen2", num_hidden_layers=4, layer_types=kinds)
    config = read_config(recipe(name, model_overrides={"num_hidden_layers": 2}))
    assert config.layer_types == kinds[:2]
    assert len(read_config(recipe(name, model_overrides={"num_hidden_layers": 6})).layer_types) == 6


def test_an_encoder_is_made_causal_for_causal_lm() -> None:
    assert read_config(recipe("bert-base", task="causal-lm")).is_decoder
    assert not read_config(recipe("bert-base", task="masked-lm")).is_decoder


def test_our_transformers_configuration(tmp_path: Path) -> None:
    config = read_config(recipe("transformer-156m", vocab_size=300, model_overrides={"num_layers": 2}))
    assert config == TransformerConfig(vocab_size=300, num_outputs=300, num_layers=2)
    assert not read_config(recipe("transformer-156m", task="masked-lm")).causal_mask
    name = write_config(tmp_path / "saved", model_type="tightfit-transformer", num_layers=3, dropout_rate=0)
    assert read_config(recipe(name)) == TransformerConfig(num_layers=3, dropout_rate=0)


@pytest.mark.parametrize(("name", "overrides", "says"), [
    ("gpt2", {"n_layers": 4}, "model_overrides.n_layers: not a field of GPT2Config; did you mean 'n_layer'"),
    ("transformer-156m", {"num_layer": 4}, "not a field of TransformerConfig; did you mean 'num_layers'"),
    ("transformer-156m", {"num_layers": "four"}, "model_overrides.num_layers: 'four' should be a valid integer"),
    ("gpt2", {"n_layer": "four"}, "model_overrides: GPT2Config refuses .*n_layer.*four"),
    ("transformer-156m", {"num_heads": 0}, "model_overrides.num_heads: 0 should be greater than 0"),
    ("transformer-156m", {"hidden_size": -8}, "model_overrides.hidden_size: -8 should be greater than 0"),
    ("transformer-156m", {"dropout_rate": 2}, "model_overrides.dropout_rate: 2 should be less than 1"),
    ("transformer-156m", {"dropout_rate": float("nan")}, "model_overrides.dropout_rate: nan should be "),
    ("transformer-156m", {"num_outputs": 9}, "num_outputs: 9 is less than .* 2048; write num_outputs=2048 or more"),
    ("vit-base", {"image_size": [32, 64]}, "model_overrides.image_size: .32, 64. is not a square"),
])
def test_wrong_overrides(name: str, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        model_facts(recipe(name, model_overrides=overrides, task=BUNDLED[name].task))


@pytest.mark.parametrize(("name", "overrides"), [
    ("gpt2", {"n_head": 3}),
    ("gpt2", {"n_inner": None}),
    ("gpt2", {"bos_token_id": 0}),
    ("t5-small", {"num_heads": 7}),  # heads of a width of their own
    ("gemma-2b", {"num_attention_heads": 7}),
])
def test_overrides_that_make_one(name: str, overrides: dict[str, Any]) -> None:
    (field, value), = overrides.items()
    assert getattr(read_config(recipe(name, task=BUNDLED[name].task, model_overrides=overrides)), field) == value


@pytest.mark.parametrize(("text", "says"), [
    ("{", "cannot be read as JSON"),
    ("[]", "should hold a JSON object"),
    ('{"class": "theirs.Model"}', "holds the weights of theirs.Model.*package.module:factory"),
    ('{"model_type": "tightfit-transformer", "num_layer": 2}', "num_layer: not a field .*; did you mean 'num_layers'"),
    ('{"model_type": "gpt9"}', "cannot be read: .*gpt9"),
    ('{"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}', "write trust_remote_code=true"),
])
def test_unreadable_folders(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says):
        read_config(recipe(str(tmp_path)))


def test_an_unreachable_hub_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"^model: .no-one/nothing. is not cached, .* reached; [^.]*$"):
        read_config(recipe("no-one/nothing"))
    for name, says in (("Qwen/Qwen3-8B-Base", "write model=qwen3-8b, its bundled shape"),
                       ("Qwen/Qwen2.5-3B", "bundled shapes of its family: qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, ")):
        with pytest.raises(ModelError, match=f"config.json is not on this machine.*{says}"):
            read_config(recipe(name))


def test_each_hub_error_has_its_own_sentence() -> None:
    class Missing(hub_errors.RepositoryNotFoundError):
        def __init__(self) -> None:
            Exception.__init__(self, "401")

    class Gated(hub_errors.GatedRepoError):
        def __init__(self) -> None:
            Exception.__init__(self, "403")

    for cause, says in ((Missing(), "is not on the Hugging Face hub"), (Gated(), "is gated: accept its terms")):
        error = OSError("a long text")
        error.__cause__ = cause
        assert says in explain_hub_error("meta-llama/x", error)
    assert explain_hub_error("a/b", OSError("two\nlines")) == "model: 'a/b' cannot be read: two lines"


@pytest.mark.parametrize(("name", "overrides", "says"), [
    ("gpt2", {"n_layer": -1}, "model_overrides.n_layer: -1 should be 1 or more"),
    ("gpt2", {"num_hidden_layers": 0}, "model_overrides.num_hidden_layers: 0 should be 1 or more"),
    ("gpt2", {"n_embd": 0}, "model_overrides.n_embd: 0 should be 1 or more"),
    ("gpt2", {"n_inner": 0}, "model_overrides.n_inner: 0 should be 1 or more"),
    ("gpt2", {"n_positions": 0}, "model_overrides.n_positions: 0 should be 1 or more"),
    ("distilbert-base", {"hidden_dim": -3}, "model_overrides.hidden_dim: -3 should be 1 or more"),
    ("llama-3.2-1b", {"max_position_embeddings": 0}, "max_position_embeddings: 0 should be 1 or more"),
    ("t5-small", {"d_kv": 0}, "model_overrides.d_kv: 0 should be 1 or more"),
    ("t5-small", {"vocab_size": 0}, "model_overrides.vocab_size: 0 should be 1 or more"),
    ("vit-base", {"patch_size": 0}, "model_overrides.patch_size: 0 should be 1 or more"),
])
def test_overrides_that_make_no_model(name: str, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_config(recipe(name, task=BUNDLED[name].task, model_overrides=overrides))


def test_a_configuration_for_another_loss_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "r", model_type="bert", problem_type="regression")
    with pytest.raises(ModelError, match=r"problem_type: 'regression' .* write model_overrides.problem_type=single"):
        read_config(recipe(folder, task="sequence-classification"))
    assert read_config(recipe(folder, task="masked-lm"))
    mended = {"problem_type": "single_label_classification"}
    assert read_config(recipe(folder, task="sequence-classification", model_overrides=mended))
    one = write_config(tmp_path / "one", model_type="bert", id2label={"0": "score"})
    with pytest.raises(ModelError, match=r"num_labels: a head of 1 logit is for regression, .* write num_labels=2"):
        read_config(recipe(one, task="sequence-classification"))
    assert read_config(recipe(one, task="sequence-classification", num_labels=2))
    for wrong in ({"problem_type": "multi_label_classification"}, {"num_labels": 1}):
        with pytest.raises(ModelError, match=next(iter(wrong))):
            module_facts(SimpleNamespace(config=SimpleNamespace(**wrong)), recipe("x:y", task="image-classification"))


def test_the_names_of_a_models_own_classes(tmp_path: Path) -> None:
    named = write_config(tmp_path / "named", model_type="bert", id2label={"0": "spam", "1": "ham", "2": "eggs"})
    assert model_facts(recipe(named, task="sequence-classification")).label_names == ("spam", "ham", "eggs")
    assert model_facts(recipe(named, task="sequence-classification", num_labels=2)).label_names == ()
    usual = write_config(tmp_path / "usual", model_type="bert", num_labels=3)
    assert model_facts(recipe(usual, task="sequence-classification")).label_names == ()


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tightfit.hub.getproxies", lambda: {"https": "http://127.0.0.1:9"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert only_local("no-one/nothing")
    assert not only_local(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("tightfit.hub.getproxies", lambda: {"https": f"http://127.0.0.1:{server.getsockname()[1]}"})
        assert not only_local("no-one/nothing")


def test_a_task_that_a_models_type_has_no_class_for_is_refused_by_its_configuration() -> None:
    says = "task: transformers has no masked-lm model of type 't5'; write task=sequence-classification or task=seq2seq"
    with pytest.raises(ModelError, match=says):
        read_config(Recipe(model="t5-small", task="masked-lm"))


def test_a_model_of_its_own_code_says_which_tasks_it_has_classes_for(tmp_path: Path) -> None:
    saved = {"model_type": "gpt2", "auto_map": {"AutoModelForSeq2SeqLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    for trusted in (True, False):  # without, it is the model's reading that asks for trust
        assert read_config(Recipe(model=str(tmp_path), task="seq2seq", trust_remote_code=trusted))
