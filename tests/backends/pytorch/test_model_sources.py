"""Models built from every kind of source, at the published sizes, and saved so that they load again."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch import nn

from tests.architectures import tiny_config, tiny_model
from tests.plain import CPU
from tightfit.backends.pytorch.assembly import bare_build
from tightfit.backends.pytorch.models import (
    BuiltModel,
    build_model,
    logits_of,
    parameter_count,
    ready_to_train,
)
from tightfit.backends.pytorch.saved_model import save_model
from tightfit.bundled import BUNDLED
from tightfit.errors import ModelError
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298, "bert-large": 335_174_458, "distilbert-base": 66_985_530, "roberta-base": 124_697_433,
    "t5-small": 60_506_624, "t5-base": 222_903_552, "llama-2-7b": 6_738_415_616, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.2-3b": 3_212_749_824,
    "t5-large": 737_668_096, "modernbert-base": 149_655_232, "modernbert-large": 395_881_664,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "mistral-7b-v0.1": 7_241_732_096,
    # Above 1B those published less the tower for images, see below.
    "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_263_168, "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "smollm3-3b": 3_075_098_624, "phi-4": 14_659_507_200, "vit-large": 304_326_632, "vit-huge": 632_045_800,
    "llama-3.2-1b": 1_235_814_400, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "mistral-7b": 7_248_023_552, "opt-125m": 125_239_296, "pythia-160m": 162_322_944,
    "gemma-2b": 2_506_172_416, "phi-2": 2_779_683_840, "vit-base": 86_567_656, "transformer-156m": 155_877_376,
    "olmoe-1b-7b": 6_919_161_856, "gpt-oss-20b": 20_914_757_184, "qwen3-30b-a3b": 30_532_122_624, "moe-tiny": 2_690_432,
}
SMALL_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
SMALL_OURS = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "max_seq_len": 32}


def build(model: str, task: str = "causal-lm", **values: Any) -> BuiltModel:
    recipe = Recipe.from_dict({"model": model, "task": task, **values})
    return build_model(recipe, get_task(task))


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", BUNDLED)
def test_published_sizes(name: str) -> None:
    recipe = Recipe.from_dict({"model": name, "task": BUNDLED[name].task})
    model, notes = build_model(recipe, get_task(recipe.task), "meta")
    assert parameter_count(model) == PUBLISHED[name]
    assert notes == ()
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("name", "published"), [
    ("gemma-3-4b", 4_300_079_472), ("gemma-3-12b", 12_187_325_040), ("gemma-3-27b", 27_432_406_640),
])
def test_gemma_3_with_its_tower_for_images(name: str, published: int) -> None:
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
             "image_size": 896, "patch_size": 14, "vision_use_head": False}
    config = transformers.Gemma3Config(text_config=dict(BUNDLED[name].numbers), vision_config=tower)
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    assert parameter_count(model) == published
    text = parameter_count(model.model.language_model)
    assert text == PUBLISHED[name]


@pytest.mark.parametrize(("name", "overrides"), [("gpt2", SMALL_GPT2), ("transformer-156m", SMALL_OURS)])
def test_weights_come_from_the_seed_alone(name: str, overrides: dict[str, Any]) -> None:
    first = build(name, model_overrides=overrides, vocab_size=64).model
    torch.rand(3)
    assert same_weights(first, build(name, model_overrides=overrides, vocab_size=64).model)
    assert not same_weights(first, build(name, model_overrides=overrides, vocab_size=64, seed=1).model)
    assert first.training
    assert {p.dtype for p in first.parameters()} == {torch.float32}


@pytest.mark.parametrize(("name", "overrides"), [("gpt2", SMALL_GPT2), ("transformer-156m", SMALL_OURS)])
def test_a_saved_model_loads_again(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = build(name, model_overrides=overrides, vocab_size=64).model
    save_model(model, tmp_path)
    loaded, notes = build(str(tmp_path), seed=5)
    assert same_weights(model, loaded)
    assert notes == ()
    assert loaded.training
    assert not same_weights(model, build(str(tmp_path), seed=5, pretrained=False).model)


@pytest.mark.parametrize(("name", "overrides", "change"), [
    ("gpt2", SMALL_GPT2, {"n_embd": 32}), ("transformer-156m", SMALL_OURS, {"hidden_size": 32}),
])
def test_weights_that_do_not_fit(
    name: str, overrides: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    save_model(build(name, model_overrides=overrides, vocab_size=64).model, tmp_path)
    with pytest.raises(ModelError, match=r"model_overrides, or write pretrained=false"):
        build(str(tmp_path), model_overrides=change)
    with pytest.raises(ModelError, match=r"write pretrained=false"):
        build(str(tmp_path), vocab_size=65)
    assert build(str(tmp_path), model_overrides=change, pretrained=False).model


def test_a_folder_without_weights_starts_from_its_configuration(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    model, (note,) = build(str(tmp_path))
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert "holds no weights" in note


@pytest.mark.parametrize(("bars", "downloads"), [(True, True), (True, False), (False, False)])
def test_no_bar_of_transformers_shows_while_weights_load_and_all_are_as_before(
    bars: bool, downloads: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def set_bars(bars: bool, downloads: bool) -> None:
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        (enable_progress_bars if downloads else disable_progress_bars)()

    logging = transformers.utils.logging
    before = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    model = tiny_model("gpt2")
    assert isinstance(model, transformers.GPT2LMHeadModel)
    model.save_pretrained(tmp_path)
    try:
        set_bars(bars, downloads)
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert ("Loading weights" in capfd.readouterr().err) == bars
        build(str(tmp_path))
        assert capfd.readouterr().err == ""
        assert (logging.is_progress_bar_enabled(), not are_progress_bars_disabled()) == (bars, downloads)
    finally:
        set_bars(*before)


def test_broken_weights(tmp_path: Path) -> None:
    for name in ("llama", "ours"):
        model = tiny_model("llama") if name == "llama" else build("transformer-156m", model_overrides=SMALL_OURS).model
        save_model(model, tmp_path / name)
        whole = (tmp_path / name / "model.safetensors").read_bytes()
        for broken in (b"not weights", whole[: len(whole) // 2]):
            (tmp_path / name / "model.safetensors").write_bytes(broken)
            with pytest.raises(ModelError, match=r"^model: the weights of .* are damaged \(.*; save, copy or download"):
                build(str(tmp_path / name))


class Touch:
    """What its pickle does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [torch.save, lambda held, path: path.write_bytes(pickle.dumps(held))])
def test_a_pickle_is_not_run(write: Any, tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    write(Touch(tmp_path / "executed"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="hold more than tensors, or are damaged, and are not read"):
        build(str(tmp_path))
    assert not (tmp_path / "executed").exists()


def test_a_batch_norm_over_micro_batches_is_said() -> None:
    def notes(**values: Any) -> tuple[str, ...]:
        recipe = resolve(Recipe.from_dict({"vocab_size": 10, "batch_size": 4, **values}), CPU)
        return bare_build(recipe, CPU, torch.device("cpu"), nn.Sequential(nn.Embedding(10, 4), nn.BatchNorm1d(4))).notes

    assert notes(micro_batch_size=2) == (
        "accumulation: 1 normalises over each micro-batch by itself, so that results follow micro_batch_size; write "
        "micro_batch_size=4 for those of the global batch",)
    assert notes(micro_batch_size=4) == ()


def test_a_classifier_of_another_size_is_drawn_anew(tmp_path: Path) -> None:
    save_model(tiny_model("vit", num_labels=5), tmp_path)
    model, (note,) = build(str(tmp_path), "image-classification", num_labels=3)
    assert "classifier" in note
    assert logits_of(model(pixel_values=torch.zeros(1, 3, 16, 16))).shape == (1, 3)
    assert build(str(tmp_path), "image-classification").notes == ()


def test_stored_weights_that_overrides_leave_no_place_for_are_counted(tmp_path: Path) -> None:
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    save_model(build("llama-3.2-1b", vocab_size=64, model_overrides={**layers, "num_hidden_layers": 3}).model, tmp_path)
    model, (note,) = build(str(tmp_path), model_overrides={"num_hidden_layers": 1})
    assert len(model.model.layers) == 1
    assert note.startswith(f"not used of what is stored with {tmp_path}: 18 weights, model.layers.1.input_layernorm.")
    assert "model_overrides" in note
    assert build(str(tmp_path)).notes == build(str(tmp_path), model_overrides={"attention_dropout": 0.1}).notes == ()


def test_stored_blocks_that_the_configuration_does_not_count_are_counted(tmp_path: Path) -> None:
    save_model(tiny_model("bert", "masked-lm", num_hidden_layers=3), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 1}))
    for task in ("masked-lm", "sequence-classification"):
        *_, note = build(str(tmp_path), task).notes
        assert note.startswith(f"not used of what is stored with {tmp_path}: 32 weights, bert.encoder.layer.1.att")
        assert note.endswith("to train the whole stored model, write its number of layers there")


def test_a_head_that_another_task_leaves_behind_is_not_remarked_on(tmp_path: Path) -> None:
    save_model(tiny_model("bert", "masked-lm"), tmp_path)
    (note,) = build(str(tmp_path), "sequence-classification").notes
    assert note.startswith("not stored with")


def test_bf16_checkpoints_under_fp16_are_noted(tmp_path: Path) -> None:
    save_model(tiny_model("llama").to(torch.bfloat16), tmp_path)
    model, (note,) = build(str(tmp_path), precision="fp16")
    assert "precision=bf16" in note
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert build(str(tmp_path), precision="bf16").notes == ()


def test_caches_are_off_and_classifiers_know_their_padding() -> None:
    model = build("gpt2", "sequence-classification", model_overrides=SMALL_GPT2, num_labels=3).model
    assert model.config.use_cache is False
    assert logits_of(model(input_ids=torch.ones(2, 4, dtype=torch.int64))).shape == (2, 3)
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "intermediate_size": 16, "vocab_size": 32, "pad_token_id": None, "eos_token_id": 2}
    config = transformers.Qwen3_5Config(text_config=text, vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2})
    seeing = ready_to_train(transformers.Qwen3_5ForSequenceClassification(config),
                            Recipe(task="sequence-classification"))
    assert logits_of(seeing(input_ids=torch.ones(2, 4, dtype=torch.int64))).shape == (2, 2)
    given = tiny_model("t5").eval()
    ids = torch.ones(2, 4, dtype=torch.int64)
    assert ready_to_train(given, Recipe()).training
    assert given(input_ids=ids, decoder_input_ids=ids).past_key_values is None


@pytest.mark.parametrize("kind", [
    "bert", "roberta", "electra", "big_bird", "megatron-bert", "rembert", "roformer", "cpmant", "prophetnet",
])
def test_an_encoder_for_causal_lm_sees_no_future_or_says_so(kind: str, tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "cpmant":
        small.update(dim_head=8, dim_ff=16)
    if kind == "prophetnet":
        small = {"hidden_size": 16, "num_decoder_layers": 4, "num_decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    transformers.AutoConfig.for_model(kind, **small, vocab_size=64).save_pretrained(tmp_path)
    model, notes = build(str(tmp_path), pretrained=False)
    model.eval()
    for parameter in model.parameters() if kind == "prophetnet" else ():  # which sees more, the further it is from 0
        torch.nn.init.normal_(parameter)
    ids = torch.arange(1, 9)[None]
    other = ids.clone()
    other[0, 5] = 60
    one, two = (logits_of(model(input_ids=i)) for i in (ids, other))
    assert torch.equal(one[:, :5], two[:, :5]) != any("sees the tokens it predicts" in note for note in notes)
    assert not torch.equal(one[:, 5:], two[:, 5:])


@pytest.mark.parametrize(("kind", "task", "numbers"), [
    ("gpt2", "causal-lm", SMALL_GPT2), ("gpt2", "causal-lm", {**SMALL_GPT2, "use_cache": False}),
    ("t5", "seq2seq", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}),
    ("vit", "image-classification", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}),
])
def test_a_saved_configuration_is_the_one_that_was_loaded(
    kind: str, task: str, numbers: dict[str, Any], tmp_path: Path
) -> None:
    given, saved = tmp_path / "given", tmp_path / "saved"
    transformers.AutoConfig.for_model(kind, **numbers).save_pretrained(given)
    model = build(str(given), task, pretrained=False).model
    save_model(model, saved)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (given, saved))
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() <= {"architectures", "dtype"}
    assert not getattr(model.config, "use_cache", False)


def test_a_task_the_model_has_no_class_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="task: transformers has no image-classification model of type 'gpt2'"):
        build("gpt2", "image-classification", model_overrides=SMALL_GPT2)
    save_model(tiny_model("gpt2"), tmp_path)
    with pytest.raises(ModelError, match="task: transformers has no seq2seq model of type 'gpt2'"):
        build(str(tmp_path), "seq2seq")
    with pytest.raises(ModelError, match="task: the bundled transformer gives logits for each token"):
        build("transformer-156m", "sequence-classification", model_overrides=SMALL_OURS)


def test_a_shape_that_cannot_be_built() -> None:
    with pytest.raises(ModelError, match=r"model: 'gpt2' cannot be built with .*divisible by num_heads"):
        build("gpt2", model_overrides={**SMALL_GPT2, "n_head": 3})
    with pytest.raises(ModelError, match=r"model: 'gpt2' cannot be built with model_overrides .*'foo'}: .*foo"):
        build("gpt2", model_overrides={**SMALL_GPT2, "activation_function": "foo"})


class Named(nn.Module):
    """Takes what a factory's recipe may give."""

    def __init__(self, width: int = 4, vocab: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, scale: float = 1.0, **kwargs: Any) -> tuple[torch.Tensor, str]:
        return self.out(self.embed(input_ids)) * scale, "aside"

    @staticmethod
    def of_nothing() -> str:
        return "no module"

    @staticmethod
    def failing() -> nn.Module:
        raise KeyError("a missing setting")

    @staticmethod
    def leaving() -> nn.Module:
        sys.exit(3)


THIS = "tests.backends.pytorch.test_model_sources"


def test_factories(tmp_path: Path) -> None:
    model = build(f"{THIS}:Named", model_overrides={"width": 6}, vocab_size=10).model
    assert isinstance(model, Named)
    assert model.embed.weight.shape == (10, 6)
    assert same_weights(model, build(f"{THIS}:Named", model_overrides={"width": 6}).model)
    assert logits_of(model(torch.zeros(1, 2, dtype=torch.int64))).shape == (1, 2, 10)
    save_model(model, tmp_path)
    with pytest.raises(ModelError, match=r"holds the weights of .*Named.*package.module:factory"):
        build(str(tmp_path))


@pytest.mark.parametrize(("name", "overrides", "says"), [
    ("no_such_package.models:make", {}, r"there is no module 'no_such_package.models'"),
    (f"{THIS}.deeper:make", {}, r"there is no module"),
    (f"{THIS}:Nmed", {}, r"has no 'Nmed'; did you mean 'Named'\?"),
    (f"{THIS}:THIS", {}, r"is a str; name a function or class"),
    (f"{THIS}:Named.of_nothing", {}, r"returned a str; it should return a torch.nn.Module"),
    (f"{THIS}:Named.failing", {}, r"Named.failing' failed with KeyError: 'a missing setting' \(.*sources.py:\d+\)$"),
    (f"{THIS}:Named.leaving", {}, r"Named.leaving' failed with SystemExit: 3"),
    (f"{THIS}:Named", {"widht": 3}, r"model_overrides: .*cannot be called with .*widht"),
])
def test_factories_that_cannot_serve(name: str, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build(name, model_overrides=overrides)


def test_a_factory_whose_own_imports_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"importing 'needs_more' failed with .*: No module named 'a_library_that_is"):
        build("needs_more:make")
    sys.modules.pop("needs_more", None)
    (tmp_path / "fails.py").write_text("1 / 0\n")
    said = r"importing 'fails' failed with ZeroDivisionError: division by zero .*fails\.py:1"
    with pytest.raises(ModelError, match=said):
        build("fails:make")


def test_logits_of() -> None:
    logits = torch.zeros(2, 3)
    assert logits_of(logits) is logits
    assert logits_of((logits, None)) is logits
    assert logits_of(transformers.modeling_outputs.CausalLMOutput(logits=logits)) is logits
    assert logits_of({"loss": None, "logits": logits}) is logits
    for wrong in ({"loss": logits}, (), None, ("no", logits)):
        with pytest.raises(ModelError, match=f"its forward returned a {type(wrong).__name__}"):
            logits_of(wrong)
