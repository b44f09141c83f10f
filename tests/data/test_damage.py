"""Data that is damaged, degenerate or hostile: one sentence, or a cache made anew; never a traceback or a hang."""

from __future__ import annotations

import json
import os
import random
import shutil
import string
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import FACTS, arrays, recipe, write_jsonl, write_texts
from tightfit.data import Prepared, prepare
from tightfit.data.corpora import open_corpus
from tightfit.data.images import read_image
from tightfit.errors import DataError
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Data

TEXT = {"data.text": "text"}


def test_one_huge_label(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}", "label": i * 10**8} for i in range(2)])
    with pytest.raises(DataError, match=r"data\.label: .* has 2 classes, numbered up to 100000000, and the model 3"):
        prepare(recipe(tmp_path, task="sequence-classification", data=str(path)), FACTS)


@pytest.mark.parametrize("label", [2**70, "9" * 30, -(2**70)])
def test_a_class_that_no_number_holds(label: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}", "label": label} for i in range(2)])
    with pytest.raises(DataError, match=r"data\.label: .* classes are numbered from 0"):
        prepare(recipe(tmp_path, task="sequence-classification", data=str(path)), FACTS)


def test_a_message_is_short_whatever_the_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x" * 300_000 + "\n1\n")
    write_jsonl(tmp_path / "b.jsonl", [{"text": ["x"] * 10_000}])
    for name in ("a.csv", "b.jsonl"):
        with pytest.raises(DataError, match=r"data\.text: ") as error:
            prepare(recipe(tmp_path, data=str(tmp_path / name)), FACTS)
        assert len(str(error.value)) < 1500


def test_parquet_files_whose_pages_are_damaged(tmp_path: Path) -> None:
    write = import_module("pyarrow.parquet").write_table
    table = import_module("pyarrow").Table.from_pylist([{"text": "some words of it"}] * 30)
    write(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    raw = (tmp_path / "a.parquet").read_bytes()
    for damaged in (raw.replace(b"some", b"so\xffe"), raw[:4] + b"\xff" * 40 + raw[44:]):
        (tmp_path / "b.parquet").write_bytes(damaged)
        with pytest.raises(DataError, match=r"^data: \S*b.parquet .*") as error:
            prepare(recipe(tmp_path, data=str(tmp_path / "b.parquet")), FACTS)
        assert "\n" not in str(error.value)


def test_an_image_of_another_format_than_it_is_named(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "a.tiff")
    (tmp_path / "a.tiff").rename(tmp_path / "a.png")
    with pytest.raises(DataError, match="is not a readable image"):
        read_image(tmp_path / "a.png", 4, 3)


def test_an_image_too_large_to_be_meant(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("1", (20_000, 10_000)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a.png is not a readable image: .*exceeds limit"):
        read_image(tmp_path / "a.png", 4, 3)


def test_a_long_line_without_spaces(tmp_path: Path) -> None:
    draw = random.Random(0)
    text = "".join(draw.choices(string.ascii_letters, k=300_000))
    (tmp_path / "a.txt").write_text(text)
    prepared = prepare(recipe(tmp_path, data={"source": str(tmp_path / "a.txt"), "eval_fraction": 0}), FACTS)
    assert prepared.tokenizer is not None
    assert prepared.tokenizer.vocab_size == 400


@pytest.mark.parametrize(("task", "packing"), [("causal-lm", False), ("causal-lm", True), ("masked-lm", False)])
def test_nothing_to_predict(task: str, packing: bool, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "<|endoftext|>"}] * 30)
    with pytest.raises(DataError, match="there is no token to predict in the documents of"):
        prepare(recipe(tmp_path, task=task, data={"source": str(path), "packing": packing}), FACTS)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_texts_to_classify_that_are_all_empty(name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / name, [{"text": "", "label": i % 2} for i in range(30)])
    if name == "a.csv":
        path.write_text("text,label\n" + "".join(f",{i % 2}\n" for i in range(30)))
    with pytest.raises(DataError, match=r"there is no text to classify in the documents of .*: each is empty"):
        prepare(recipe(tmp_path, task="sequence-classification", data=str(path)), FACTS)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(("pattern", "damage"), [
    ("tokens/*/train/*/tokens.bin", cut),
    ("tokens/*/train/*/starts.npy", emptied),
    ("tokens/*/evaluation/*/counts.npy", cut),
    ("tokens/*/names.json", lambda path: path.write_text("{")),
    ("tokens/*/names.json", lambda path: path.write_text("7")),
    ("tokens/*/train", shutil.rmtree),
    ("tokenizers/*/tokenizer.json", cut),
    ("tokenizers/*/tokenizer.json", os.remove),
])
def test_a_damaged_cache_is_made_anew(pattern: str, damage: Callable[[Path], object], tmp_path: Path) -> None:
    settings = recipe(tmp_path, data={"source": str(write_texts(tmp_path / "a.jsonl")), "eval_fraction": 0.2})

    def rows(prepared: Prepared) -> dict[str, np.ndarray]:
        return arrays(prepared.train.batch(np.arange(len(prepared.train)), 0))

    first = {name: value.copy() for name, value in rows(prepare(settings, FACTS)).items()}
    (path,) = (tmp_path / "cache").glob(pattern)
    damage(path)
    second = rows(prepare(settings, FACTS))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("line", "says"), [
    (json.dumps({"text": "a\ud800b"}), r"a\.jsonl line 2 is not JSON in UTF-8: .*surrogates not allowed"),
    ('{"text": ' + "[" * 100_000, r"a\.jsonl line 2 is not JSON"),
])
def test_lines_that_no_encoding_or_parser_takes(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine \\ud83d\\ude00"}}\n{line}\n')
    with pytest.raises(DataError, match=says):
        list(open_corpus(Data(source=str(path)), TEXT, tmp_path).rows())


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere.txt")
    os.mkfifo(tmp_path / "c.txt")
    assert list(open_corpus(Data(source=str(tmp_path)), TEXT, tmp_path).rows()) == [("some text",)]
    for source in (os.devnull, str(tmp_path / "c.txt")):
        with pytest.raises(DataError, match="is not a regular file; write a file, a folder"):
            open_corpus(Data(source=source), TEXT, tmp_path)


def test_fewer_image_classes_than_the_models(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "pics" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "pics" / name / "0.png")
    source = {"source": str(tmp_path / "pics"), "eval_fraction": 0}
    settings = recipe(tmp_path, task="image-classification", data=source)
    facts = ModelFacts(num_labels=5, image_size=4)
    with pytest.raises(DataError, match="has 2 classes and the model 5; write num_labels=2"):
        prepare(settings, facts)
    assert len(prepare(settings.override(num_labels=5), facts).train) == 2
