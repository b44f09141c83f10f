"""From a recipe to the micro-batches of every task."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import FACTS, arrays, recipe, texts, write_jsonl, write_texts
from tests.failing import failing
from tightfit.data import GlobalBatchLoader, Prepared, prepare
from tightfit.data.images import image_processor, open_images, read_image
from tightfit.data.samples import Packed, truncated
from tightfit.data.tokenized import class_ids
from tightfit.errors import DataError, Refused
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, TASKS, MicroBatch, global_batch_of

TINY_IMAGES = ModelFacts(num_labels=2, image_size=4)


def everything(prepared: Prepared) -> MicroBatch:
    return prepared.train.batch(np.arange(len(prepared.train)), 0)


def test_packed_rows_hold_the_training_documents(tmp_path: Path) -> None:
    settings = recipe(tmp_path, data={"source": str(write_texts(tmp_path / "a.jsonl")), "eval_fraction": 0.2})
    prepared = prepare(settings, FACTS)
    assert isinstance(prepared.train, Packed)
    assert isinstance(prepared.evaluation, Packed)
    assert prepared.tokenizer is not None
    decode = prepared.tokenizer.decode
    train, held = ([decode(s.document(i)) for i in range(s.documents)] for s in
                   (prepared.train.stream, prepared.evaluation.stream))  # fmt: skip
    assert (len(train), len(held)) == (24, 6)
    assert sorted(train + held) == sorted(texts(30))
    assert train == [t for t in texts(30) if t in train]
    assert prepared.unigram_loss is not None
    assert 3.0 < prepared.unigram_loss < math.log(400)


def test_the_second_time_nothing_is_read_or_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recipe(tmp_path, data=str(write_texts(tmp_path / "a.jsonl")))
    seen: list[tuple[str, int, int]] = []
    first = prepare(settings, FACTS, progress=lambda *now: seen.append(now))
    assert [now for now in seen if now[1] == now[2]] == [("training the tokenizer", 30, 30), ("tokenizing", 30, 30)]
    never = failing(AssertionError("encoded again"))
    monkeypatch.setattr("tightfit.data.tokenizing.Tokenizer.encode_batch", never)
    monkeypatch.setattr("tightfit.data.corpora.read_file", never)
    second = prepare(settings, FACTS)
    one, two = arrays(everything(first)), arrays(everything(second))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    with pytest.raises(AssertionError, match="again"):  # another share held out is another cache entry
        prepare(settings.override(data={**settings.to_dict()["data"], "eval_fraction": 0.5}), FACTS)


def test_a_tokenizer_far_smaller_than_the_vocabulary_is_told(tmp_path: Path) -> None:
    settings = recipe(tmp_path, data=str(write_texts(tmp_path / "a.jsonl")))
    found = [prepare(settings, replace(FACTS, vocab_size=size)).notes for size in (300, 50_000)]
    assert found[0] == ()
    assert [note.startswith("vocab_size: the tokenizer has ") for note in found[1]] == [True]


def test_a_single_document_is_cut(tmp_path: Path) -> None:
    text = "".join(texts(40))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    seen: list[tuple[str, int, int]] = []
    settings = recipe(tmp_path, data={"source": str(tmp_path / "a.txt"), "eval_fraction": 0.1})
    prepared = prepare(settings, FACTS, progress=lambda *now: seen.append(now))
    assert seen == [("training the tokenizer", 1, 1), ("tokenizing", 1, 1)]
    assert isinstance(prepared.train, Packed)
    assert isinstance(prepared.evaluation, Packed)
    assert prepared.tokenizer is not None
    begin, end = (prepared.tokenizer.decode(p.stream.document(0)) for p in (prepared.train, prepared.evaluation))
    assert begin + end == text
    assert 0.05 < len(end) / len(text) < 0.2


def test_nothing_held_out(tmp_path: Path) -> None:
    source = str(write_texts(tmp_path / "a.jsonl"))
    prepared = prepare(recipe(tmp_path, data={"source": source, "eval_fraction": 0.0}), FACTS)
    assert (prepared.evaluation, prepared.unigram_loss) == (None, None)


def test_unpacked_causal_rows(tmp_path: Path) -> None:
    settings = recipe(tmp_path, data={"source": str(write_texts(tmp_path / "a.jsonl")), "packing": False},
                      pad_sequence_to=12)  # fmt: skip
    prepared = prepare(settings, FACTS)
    batch = prepared.train.batch(np.arange(len(prepared.train)), 0)
    assert prepared.tokenizer is not None
    assert (batch.mask, batch.padding_mask) == ("none", None)
    ids, labels = batch.inputs["input_ids"], batch.labels
    assert ids.shape[1] == 24  # seq_len 16, rounded up
    lengths = []
    held = set(texts(30))
    for row, predicted in zip(ids, labels, strict=True):
        counted = np.flatnonzero(predicted != IGNORE)
        assert (counted == np.arange(len(counted))).all()
        whole = predicted[len(counted) - 1] == prepared.tokenizer.end_id
        assert np.array_equal(row[1 : len(counted)], predicted[: len(counted) - 1])
        text = prepared.tokenizer.decode([row[0], *predicted[: len(counted)]])
        assert text in held if whole and len(counted) < 16 else any(t.startswith(text) for t in held)
        lengths.append(min(len(counted) + int(whole and len(counted) < 16), 16))
    assert global_batch_of((batch,)).tokens == sum(lengths)
    global_batch = GlobalBatchLoader(prepared.train, settings).global_batch(0)
    assert global_batch.tokens < sum(m.inputs["input_ids"].size for m in global_batch.micro_batches)


@pytest.mark.parametrize("packing", [True, False])
def test_masked_lm(packing: bool, tmp_path: Path) -> None:
    source = str(write_texts(tmp_path / "a.jsonl", 60))
    settings = recipe(tmp_path, task="masked-lm", data={"source": source, "packing": packing})
    prepared = prepare(settings, FACTS)
    assert prepared.tokenizer is not None
    first, other = (prepared.train.batch(np.arange(20), epoch) for epoch in (0, 1))
    again = prepared.train.batch(np.arange(10, 20), 0)
    assert first.mask == ("packed" if packing else "padded")
    counted = first.labels != IGNORE
    width = again.labels.shape[1]
    assert np.array_equal(first.labels[10:, :width], again.labels)  # whatever micro-batch a sample is in
    assert not np.array_equal(first.labels, other.labels)
    assert 0.1 < counted.mean() < 0.2
    assert not np.isin(first.labels[counted], prepared.tokenizer.special_ids).any()
    assert (first.inputs["input_ids"][counted] == prepared.tokenizer.mask_id).mean() > 0.6


def classified(tmp_path: Path, labels: list[Any], **changes: Any) -> Recipe:
    rows = [{"text": text, "label": label} for text, label in zip(texts(len(labels)), labels, strict=True)]
    source = str(write_jsonl(tmp_path / "c.jsonl", rows))
    return recipe(tmp_path, task="sequence-classification", data={"source": source, "eval_fraction": 0.1}, **changes)


def test_classification(tmp_path: Path) -> None:
    labels = ["pos", "neg", "neutral", "neg"] * 10
    prepared = prepare(classified(tmp_path, labels), FACTS)
    assert prepared.classes == {0: "neg", 1: "neutral", 2: "pos"}
    assert prepared.unigram_loss is None
    batch = everything(prepared)
    assert batch.labels.shape == (36,)
    assert batch.mask == "padded"
    assert batch.padding is not None
    assert prepared.tokenizer is not None
    by_text = {text: label for text, label in zip(texts(40), labels, strict=True)}  # noqa: C416
    short = 0
    for row, real, label in zip(batch.inputs["input_ids"], batch.padding, batch.labels, strict=True):
        assert (row[~real] == FACTS.pad_token_id).all()
        assert prepared.tokenizer.end_id not in row[real]  # which the tokenizer does not write by itself
        if real.sum() < 16:
            short += 1
            assert by_text[prepared.tokenizer.decode(row[real])] == prepared.classes[label]
    assert short > 3


def test_classes_have_the_numbers_of_a_model_that_knows_them(tmp_path: Path) -> None:
    trained = replace(FACTS, label_names=("spam", "ham", "eggs"))
    labels = ["eggs", "spam", "ham", "eggs"] * 10
    prepared, alone = prepare(classified(tmp_path, labels), trained), prepare(classified(tmp_path, labels), FACTS)
    assert prepared.classes == {0: "spam", 1: "ham", 2: "eggs"}
    assert alone.classes == {0: "eggs", 1: "ham", 2: "spam"}
    assert [prepared.classes[label] for label in everything(prepared).labels] == [
        alone.classes[label] for label in everything(alone).labels]
    some = prepare(classified(tmp_path, ["ham", "eggs"] * 10), trained)
    assert some.classes == prepared.classes
    assert set(everything(some).labels.tolist()) == {1, 2}
    with pytest.raises(DataError, match=r"data\.label: 'beans' is none of the model's classes \(spam, ham, eggs\), and "
                                        r"others are; rename it, or write num_labels=2 to number classes anew"):
        prepare(classified(tmp_path, ["ham", "beans"] * 10), trained)
    anew = prepare(classified(tmp_path, ["ham", "beans"] * 10, num_labels=3), trained)
    assert anew.classes == {0: "beans", 1: "ham"}
    assert prepare(classified(tmp_path, ["x", "y", "z"] * 10), trained).classes == {0: "x", 1: "y", 2: "z"}


def test_images_have_the_numbers_of_a_model_that_knows_their_classes(tmp_path: Path) -> None:
    for name in ("blue", "red"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "0.png")
    images, names = open_images(str(tmp_path), replace(TINY_IMAGES, label_names=("red", "blue")), None, (0.5, 0.5))
    assert names == ("red", "blue")
    assert {file.parent.name: number for file, number in zip(images.files, images.classes, strict=True)} == {
        "red": 0, "blue": 1}


def test_classes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.label: .* has 4 classes and the model 3; write num_labels=4"):
        prepare(classified(tmp_path, ["a", "b", "c", "d"]), FACTS)
    with pytest.raises(DataError, match=r"has 4 classes and the model 3; write num_labels=4"):
        prepare(classified(tmp_path, [0, 3, 2, 1]), FACTS)
    assert prepare(classified(tmp_path, [0, 2, 1, 1]), FACTS).classes is None  # numbers are no names
    with pytest.raises(DataError, match=r"3 classes, numbered up to 4, and the model 3; number .*num_labels=5"):
        prepare(classified(tmp_path, [0, 4, 1, 1]), FACTS)
    with pytest.raises(DataError, match="of row 2 is None"):
        prepare(classified(tmp_path, ["a", None, "b", "a"]), FACTS)


def test_numbers_to_regress_on_are_no_classes(tmp_path: Path) -> None:
    says = (r"data\.label: field 'label' of .*c\.jsonl looks like numbers to regress on, such as -0\.75, which no task "
            r"here does; write data\.label=<the field of a class>, or num_labels=4 where each of them is a class")
    with pytest.raises(DataError, match=says):
        prepare(classified(tmp_path, ["0.5", "1", "-0.75", "3e-1"]), FACTS)
    says = (r"row 2 is 0\.25; write a text, or a whole number in every row, for no task here regresses on numbers; or "
            r"data\.label=<the field of a class>")
    with pytest.raises(DataError, match=says):
        prepare(classified(tmp_path, [1, 0.25, 2, 3]), FACTS)
    for labels in (["1.0", "2.0", "3.0", "4.0"], ["0.5", "1.5", "2.5", "many"]):
        with pytest.raises(DataError, match="has 4 classes and the model 3; write num_labels=4"):
            prepare(classified(tmp_path, labels), FACTS)
    assert prepare(classified(tmp_path, ["0.5", "1", "1.5", "1"]), FACTS).classes == {0: "0.5", 1: "1", 2: "1.5"}


def test_labels_that_are_numbers_stay_so() -> None:
    assert class_ids([2, 0, 1], "label") == class_ids(["2", "0", "1"], "label") == ([2, 0, 1], [])
    assert class_ids(["10", "9"], "label")[0] == [10, 9]
    assert class_ids([True, False], "label")[0] == [1, 0]
    for wrong in (-1, 10**30):
        with pytest.raises(DataError, match=rf"row 2 is {wrong}; .*below num_labels"):
            class_ids([0, wrong], "label")
    with pytest.raises(DataError, match="row 3 is None; write a text, or a whole number"):
        class_ids([0, 1, None, "1"], "label")
    with pytest.raises(DataError, match="row 2 is ''"):
        class_ids(["good", "", "bad"], "label")


def test_seq2seq(tmp_path: Path) -> None:
    rows = [{"text": text, "target": text.upper()} for text in texts(30)]
    facts = ModelFacts(vocab_size=400, max_positions=64, pad_token_id=1, decoder_start_token_id=7)
    prepared = prepare(recipe(tmp_path, task="seq2seq", data=str(write_jsonl(tmp_path / "t.jsonl", rows))), facts)
    batch = everything(prepared)
    assert prepared.tokenizer is not None
    assert prepared.tokenizer.backend.token_to_id("<pad>") == 1
    assert batch.mask == "padded"
    decoder = batch.inputs["decoder_input_ids"]
    assert decoder.shape == batch.labels.shape
    assert (decoder[:, 0] == 7).all()
    for reads, predicts in zip(decoder, batch.labels, strict=True):
        real = predicts != IGNORE
        assert np.array_equal(reads[1 : real.sum()], predicts[real][:-1])
        assert (reads[~real] == 1).all()
    short = [i for i, real in enumerate(batch.padding.sum(axis=1)) if real < 16] if batch.padding is not None else []
    for i in short:
        source = prepared.tokenizer.decode(batch.inputs["input_ids"][i])
        target = prepared.tokenizer.decode(batch.labels[i][batch.labels[i] != IGNORE])
        assert source.upper().startswith(target)
    assert short
    assert prepared.unigram_loss is not None
    cut = np.flatnonzero((batch.labels != IGNORE).all(axis=1))
    assert len(cut)
    assert set(batch.labels[cut, -1].tolist()) == {prepared.tokenizer.end_id}  # as the source keeps its own


@pytest.mark.parametrize("task", sorted(TASKS))
def test_dummy(task: str, tmp_path: Path) -> None:
    settings = recipe(tmp_path, task=task, data={"source": "dummy", "samples": 20})
    facts = ModelFacts(vocab_size=400, num_labels=3, image_size=8, max_positions=64)
    prepared = prepare(settings, facts)
    assert len(prepared.train) == 20
    assert (prepared.tokenizer, prepared.unigram_loss) == (None, None)
    batch = prepared.train.batch(np.array([3, 9]), 0)
    spec = TASKS[task].batch_spec(2, 16, facts)
    for name, array in (*batch.inputs.items(), ("labels", batch.labels)):
        wanted = spec.labels if name == "labels" else spec.inputs[name]
        assert array.shape == wanted.shape
        assert array.dtype == np.dtype(wanted.dtype)
        assert not wanted.high or (array.min() >= wanted.low and array.max() < wanted.high)
    assert batch.inputs.keys() == spec.inputs.keys()
    again = prepared.train.batch(np.array([9]), 5)
    assert all(np.array_equal(value[1:], arrays(again)[name]) for name, value in arrays(batch).items())
    assert not np.array_equal(*next(iter(batch.inputs.values())))
    assert prepared.evaluation is not None
    held = prepared.evaluation.batch(np.array([0]), 0)
    first = prepared.train.batch(np.array([0]), 0)
    assert not np.array_equal(next(iter(held.inputs.values())), next(iter(first.inputs.values())))
    if task == "causal-lm":
        assert np.array_equal(batch.labels[:, :-1], batch.inputs["input_ids"][:, 1:])


def save_images(folder: Path, sizes: dict[str, int]) -> None:
    from PIL import Image

    for number, (name, count) in enumerate(sizes.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            ending = "png" if i % 2 else "jpg"
            Image.new("RGB", (10, 6), (255 * number, 0, 255)).save(folder / name / f"{i}.{ending}", quality=100)


def test_images(tmp_path: Path) -> None:
    save_images(tmp_path / "pics", {"black": 6, "red": 4})
    source = {"source": str(tmp_path / "pics"), "eval_fraction": 0.2}
    settings = recipe(tmp_path, task="image-classification", data=source)
    prepared = prepare(settings, TINY_IMAGES)
    assert prepared.classes == {0: "black", 1: "red"}
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (8, 2)
    batch = everything(prepared)
    pixels = batch.inputs["pixel_values"]
    assert pixels.shape == (8, 3, 4, 4)
    assert pixels.dtype == np.float32
    assert batch.mask == "none"
    expected = np.where(batch.labels == 1, 1.0, -1.0)
    assert np.allclose(pixels[:, 0], expected[:, None, None], atol=0.02)
    assert np.allclose(pixels[:, 1], -1.0, atol=0.02)
    assert np.allclose(pixels[:, 2], 1.0, atol=0.02)
    global_batch = GlobalBatchLoader(prepared.train, settings).global_batch(0)
    assert (global_batch.tokens, global_batch.count) == (4, 4)


def test_images_of_their_own_to_evaluate_on(tmp_path: Path) -> None:
    save_images(tmp_path / "pics", {"black": 6, "red": 4})
    save_images(tmp_path / "held", {"none": 0, "red": 3})  # which is the second of the classes
    source = {"source": str(tmp_path / "pics"), "eval_source": str(tmp_path / "held")}
    (tmp_path / "held" / "none").rmdir()
    prepared = prepare(recipe(tmp_path, task="image-classification", data=source), TINY_IMAGES)
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (10, 3)
    held = prepared.evaluation.batch(np.arange(3), 0)
    assert held.labels.tolist() == [1, 1, 1]
    (tmp_path / "held" / "red").rename(tmp_path / "held" / "blue")
    with pytest.raises(DataError, match=r"data.eval_source: .* has the class 'blue', .*\(black, red\)"):
        prepare(recipe(tmp_path, task="image-classification", data=source), TINY_IMAGES)


@pytest.mark.parametrize("channels", [3, 1])
def test_the_image_processor_that_is_saved_makes_the_same_pixels(tmp_path: Path, channels: int) -> None:
    from PIL import Image
    from transformers import ViTImageProcessorPil

    noise = np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert("L" if channels == 1 else "RGB")
    image.save(tmp_path / "a.png")
    facts = ModelFacts(image_size=8, num_channels=channels)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processor(facts)))
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    given = image if channels == 3 else np.asarray(image)[..., None]
    made = processor(given, return_tensors="np")["pixel_values"][0]
    assert np.allclose(made, read_image(tmp_path / "a.png", 8, channels), atol=0.03)


@pytest.mark.parametrize(("stored", "mean", "deviation"), [
    ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.1, 0.2, 0.3]}, [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]),
    ({"do_normalize": False, "image_mean": [0.4] * 3, "image_std": [0.1] * 3}, [0.0] * 3, [1.0] * 3),
    (None, [0.5] * 3, [0.5] * 3),
])  # fmt: skip
def test_pixels_are_scaled_as_the_stored_models_are(tmp_path: Path, stored: Any, mean: Any, deviation: Any) -> None:
    from PIL import Image

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "vit"}))
    if stored is not None:
        stored = {"image_processor_type": "ViTImageProcessor", **stored}
        (model / "preprocessor_config.json").write_text(json.dumps(stored))
    for name, colour in (("red", (255, 0, 51)), ("black", (0, 0, 0))):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), colour).save(tmp_path / "images" / name / "a.png")
    settings = recipe(tmp_path, model=str(model), task="image-classification",
                      data={"source": str(tmp_path / "images"), "eval_fraction": 0.0})
    prepared = prepare(settings, TINY_IMAGES)
    pixels = prepared.train.batch(np.array([1]), 0).inputs["pixel_values"][0, :, 0, 0]
    assert np.allclose(pixels, (np.array([1.0, 0.0, 0.2]) - mean) / deviation, atol=1e-6)
    assert prepared.image_processor is not None
    assert (prepared.image_processor["image_mean"], prepared.image_processor["image_std"]) == (mean, deviation)


def test_a_part_to_evaluate_on_has_the_classes_of_the_rest(tmp_path: Path) -> None:
    settings = classified(tmp_path, ["b", "c"] * 5)
    held = write_jsonl(tmp_path / "held.jsonl", [{"text": "the dog", "label": "a"}, {"text": "tea", "label": "c"}])
    data = {**settings.to_dict()["data"], "eval_source": str(held)}
    prepared = prepare(settings.override(data=data), FACTS)
    assert prepared.classes == {0: "a", 1: "b", 2: "c"}
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (10, 2)
    assert prepared.evaluation.batch(np.arange(2), 0).labels.tolist() == [0, 2]
    with pytest.raises(DataError, match=r"3 classes \('a' among the held-out rows alone\) and the model 2; write num"):
        prepare(settings.override(data=data), replace(FACTS, num_labels=2))


def test_a_split_to_evaluate_on(tmp_path: Path) -> None:
    import datasets

    parts = {"train": datasets.Dataset.from_list([{"text": text} for text in texts(9)]),
             "test": datasets.Dataset.from_list([{"text": text} for text in texts(4)])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    data = {"source": str(tmp_path / "saved"), "eval_split": "test", "packing": False}
    prepared = prepare(recipe(tmp_path, data=data), FACTS)
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (9, 4)
    for source in ("dummy", "stdlib", str(write_texts(tmp_path / "a.jsonl"))):
        with pytest.raises(DataError, match=r"data.eval_split: .* has no splits; write data.eval_source"):
            prepare(recipe(tmp_path, data={"source": source, "eval_split": "test"}), FACTS)


def test_a_split_or_a_configuration_of_what_has_none_is_refused(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"text": text} for text in texts(9)])
    table.save_to_disk(str(tmp_path / "table"))
    datasets.DatasetDict({"validation": table}).save_to_disk(str(tmp_path / "splits"))
    file, table_folder, splits = (str(path) for path in (
        write_texts(tmp_path / "a.jsonl"), tmp_path / "table", tmp_path / "splits"))
    for source in ("dummy", "stdlib", file, table_folder):
        with pytest.raises(DataError, match=r"data.split: 'validation' .* has no splits; leave it out, or write data="):
            prepare(recipe(tmp_path, data={"source": source, "split": "validation"}), FACTS)
        with pytest.raises(DataError, match=r"data.config: 'en' .* has no configurations; leave it out, or write data"):
            prepare(recipe(tmp_path, data={"source": source, "config": "en"}), FACTS)
    with pytest.raises(DataError, match=r"data.eval_split: 'test' .* has no splits"):
        prepare(recipe(tmp_path, data={"source": splits, "split": "validation", "eval_source": file,
                                       "eval_split": "test"}), FACTS)
    for data in ({"source": splits}, {"source": file, "eval_source": splits}):  # which has the split
        assert len(prepare(recipe(tmp_path, data={**data, "split": "validation"}), FACTS).train)


def test_an_image_keeps_its_way_up(tmp_path: Path) -> None:
    from PIL import Image

    corner = np.zeros((8, 8, 3), dtype=np.uint8)
    corner[:4, 4:, 1] = 255  # green at the top right
    Image.fromarray(corner).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png", 2, 3)
    assert (pixels[[0, 2]] == -1.0).all()
    assert (pixels[1] > 0.0).tolist() == [[False, True], [False, False]]
    assert read_image(tmp_path / "a.png", 2, 1).shape == (1, 2, 2)


def test_image_folders_that_cannot_serve(tmp_path: Path) -> None:
    def settings(source: Path) -> Recipe:
        return recipe(tmp_path, task="image-classification", data=str(source), batch_size=1, micro_batch_size=1)

    with pytest.raises(DataError, match="does not exist"):
        prepare(settings(tmp_path / "nowhere"), TINY_IMAGES)
    (tmp_path / "flat").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        prepare(settings(tmp_path / "flat"), TINY_IMAGES)
    save_images(tmp_path / "three", {"a": 1, "b": 1, "c": 1})
    with pytest.raises(DataError, match="has 3 classes and the model 2; write num_labels=3"):
        prepare(settings(tmp_path / "three"), TINY_IMAGES)
    save_images(tmp_path / "broken", {"a": 2})
    for path in (tmp_path / "broken" / "a").iterdir():
        path.write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"broken/a/0\.jpg is not a readable image|broken/a/1\.png is not a readable"):
        prepare(settings(tmp_path / "broken"), TINY_IMAGES).train.batch(np.array([0]), 0)


def test_too_short_and_too_long(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("few words")
    few = recipe(tmp_path, data=str(tmp_path / "a.txt"), seq_len=64)
    with pytest.raises(DataError, match=r"seq_len: .* has \d+ training tokens, fewer than one sequence of 64; write"):
        GlobalBatchLoader(prepare(few, FACTS).train, few)
    with pytest.raises(Refused, match="seq_len: 65 exceeds the model's 64 positions; write seq_len=64"):
        prepare(recipe(tmp_path, data="dummy", seq_len=65), FACTS)
    unpacked = {"source": "dummy", "packing": False}
    with pytest.raises(DataError, match=r"pad_sequence_to: .* multiple of 48 .*; write seq_len=48"):
        prepare(recipe(tmp_path, data=unpacked, seq_len=60, pad_sequence_to=48), FACTS)
    with pytest.raises(DataError, match="holds no text"):
        prepare(recipe(tmp_path, data=str(write_jsonl(tmp_path / "b.jsonl", [{"text": " "}] * 3))), FACTS)
    short = prepare(recipe(tmp_path, data=str(write_texts(tmp_path / "c.jsonl", 4))), FACTS)
    with pytest.raises(DataError, match=r"batch_size: .* write batch_size=\d+ or less"):
        GlobalBatchLoader(short.train, recipe(tmp_path, batch_size=64))


@pytest.mark.parametrize(("tokens", "special", "kept"), [
    (10, (9,), [0, 1, 2, 9]), (10, (8, 9), [0, 1, 8, 9]), (10, (8,), [0, 1, 2, 3]), (4, (), [0, 1, 2, 3]),
    (10, range(10), [6, 7, 8, 9]),
])
def test_truncation_keeps_the_special_tokens_at_the_end(tokens: int, special, kept: list[int]) -> None:
    assert truncated(np.arange(tokens), 4, tuple(special)).tolist() == kept
