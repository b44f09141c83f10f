"""Every source of documents, read alike, and every bad one refused with a sentence that helps."""

from __future__ import annotations

import csv
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import texts, write_jsonl
from tightfit.data.corpora import Corpus, open_corpus
from tightfit.data.readers import Row
from tightfit.data.splitting import held_out, split_text
from tightfit.errors import DataError
from tightfit.recipe import Data

CACHE = Path("unused")
TEXT = {"data.text": "text"}
BOTH = {"data.text": "text", "data.label": "label"}
ROWS = [{"text": text, "label": i % 3, "other": None} for i, text in enumerate([*texts(5), 'a "quoted",\nsecond line'])]


def opened(source: Path | str, wanted: dict[str, str] | None = None, **fields: Any) -> Corpus:
    return open_corpus(Data(source=str(source), **fields), wanted or TEXT, CACHE)


def read(source: Path | str, wanted: dict[str, str] | None = None, **fields: Any) -> list[Row]:
    return list(opened(source, wanted, **fields).rows())


def refused(match: str, source: Path | str, wanted: dict[str, str] | None = None, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(source, wanted, **fields)
    assert re.search(match, str(caught.value)), str(caught.value)
    return str(caught.value)


def write_csv(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def save_dataset(path: Path, splits: bool = False) -> Path:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict({"train": dataset, "validation": dataset.select([0])}) if splits else dataset).save_to_disk(
        str(path)
    )
    return path


def test_every_format_reads_alike(tmp_path: Path) -> None:
    expected = [(row["text"], row["label"]) for row in ROWS]
    (tmp_path / "folder").mkdir()
    assert read(write_jsonl(tmp_path / "a.jsonl", ROWS), BOTH) == expected
    assert read(write_parquet(tmp_path / "a.parquet"), BOTH) == expected
    assert read(save_dataset(tmp_path / "saved"), BOTH) == expected
    assert read(save_dataset(tmp_path / "splits", splits=True), BOTH) == expected
    assert read(tmp_path / "splits", BOTH, split="validation") == expected[:1]
    for path in (write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "a.tsv", "\t")):
        assert [(text, int(label)) for text, label in read(path, BOTH)] == expected
    write_jsonl(tmp_path / "folder" / "b.jsonl", ROWS[3:])
    write_jsonl(tmp_path / "folder" / "a.jsonl", ROWS[:3])
    assert read(tmp_path / "folder", BOTH) == expected


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffcafé\r\nsecond".encode())
    assert read(tmp_path / "a.txt") == [("café\r\nsecond",)]


@pytest.mark.parametrize("row", ['neg,"left open', '"left open,neg'])
def test_a_quote_that_is_closed_nowhere_takes_in_no_rows(row: str, tmp_path: Path) -> None:
    names = "label,text" if row.startswith("neg") else "text,label"
    (tmp_path / "a.csv").write_text(f'{names}\n"two\nlines",b\n{row}\nfine,too\nfine,too\n')
    with pytest.raises(DataError, match=r"a.csv line 4 opens a double quote that is closed nowhere"):
        read(tmp_path / "a.csv")


def test_a_csv_value_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on it is a C `long`, of 32 bits on Windows."""
    set_limit = csv.field_size_limit

    def on_windows(limit: int) -> int:
        if limit >= 1 << 31:
            raise OverflowError("Python int too large to convert to C long")
        return set_limit(limit)

    monkeypatch.setattr(csv, "field_size_limit", on_windows)
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(read(tmp_path / "a.csv")[0][0]) == 200_000


def test_a_folder_is_read_in_order_and_what_has_no_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, raw in (("b.md", b"bee"), ("a.txt", b"ay"), ("sub/c.py", b"sea"), ("d.bin", b"\0\1"), ("empty.txt", b""),
                      ("e.txt", b"\xff\xfe"), (".hidden/f.txt", b"no"), (".g.txt", b"no")):  # fmt: skip
        (tmp_path / name).write_bytes(raw)
    assert read(tmp_path) == [("ay",), ("bee",), ("sea",)]


def test_the_standard_library(tmp_path: Path) -> None:
    documents = read("stdlib")
    here = Path(sysconfig.get_path("stdlib"))
    assert ((here / "dataclasses.py").read_text(encoding="utf-8"),) in documents
    assert len(documents) > 300
    assert not any("from pytest" in text for (text,) in documents)
    assert opened("stdlib").fingerprint == opened("stdlib").fingerprint
    refused("stdlib has text only.*data.label=label", "stdlib", BOTH)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    before = opened(path).fingerprint
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    assert opened(copy).fingerprint == before
    write_jsonl(path, ROWS[:-1])
    assert opened(path).fingerprint != before


def test_slices_of_one_stored_dataset_have_fingerprints_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    stored = datasets.load_from_disk(str(save_dataset(tmp_path / "s")))
    assert stored.cache_files
    slices = {"train[:3]": stored.select(range(3)), "train[3:]": stored.select(range(3, 6)), "train[:2]": stored}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, cache_dir: slices[split])
    found = {opened("owner/name", split=split).fingerprint for split in slices}
    assert len(found) == 3
    in_memory = [datasets.Dataset.from_list(rows) for rows in (ROWS[:3], ROWS[3:])]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, cache_dir: in_memory.pop())
    assert len({opened("owner/name").fingerprint for _ in range(2)}) == 2


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    refused("does not exist; did you mean 'train.jsonl'", tmp_path / "trian.jsonl")
    refused("does not exist", tmp_path / "no" / "such" / "file.txt")
    refused("the source is empty", "")


def test_a_drive_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is its own parent, and no folder."""
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    refused(r"does not exist; there is no /", "/no/such/file.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_empty_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    refused(f"{name} is empty", tmp_path / name)


def test_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    (tmp_path / "a.csv").write_bytes(b"text,label\n")
    refused("a.jsonl has no rows", tmp_path / "a.jsonl")
    refused("a.csv has no rows", tmp_path / "a.csv")


def test_a_row_of_another_length_than_the_first_line_is_refused(tmp_path: Path) -> None:
    for row, count in (("a, b,0", 3), ("a", 1)):
        (tmp_path / "a.csv").write_text(f"text,label\nfine,1\n{row}\n")
        refused(rf"a.csv line 3 has {count} values, and its first line names 2 fields; put .* in double quotes",
                tmp_path / "a.csv")


def test_a_name_that_stands_twice_in_the_first_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\nfirst,second\n")
    refused("a.csv names two fields 'text' in its first line; give each its own name", tmp_path / "a.csv")


def test_binary_and_otherwise_encoded_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"PK\0\1\2")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "latin.csv").write_bytes("text\ncafé\n".encode("latin-1"))
    (tmp_path / "fake.parquet").write_bytes(b"not parquet at all")
    refused("a.bin is a binary file", tmp_path / "a.bin")
    refused(r"latin.txt is not UTF-8 text \(byte 3\)", tmp_path / "latin.txt")
    refused("latin.csv is not CSV in UTF-8 behind line 0", tmp_path / "latin.csv")
    refused("fake.parquet is not a Parquet file", tmp_path / "fake.parquet")


def test_broken_json_lines_are_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": "bro\n')
    refused("a.jsonl line 3 is not JSON", path)
    path.write_text('{"text": "fine"}\n[1]\n')
    refused("a.jsonl line 2 is not an object such as .* write one a line", path)
    path.write_text('{"text": "fine"}\n{"text": 5}\n')
    refused("data.text: field 'text' of .*a.jsonl line 2 is 5, not text", path)
    path.write_text('{"text": "fine"}\n{"body": "x", "n": 1}\n')
    refused("data.text: .*line 2 has no field 'text'; it has body, n", path)


def test_missing_fields_name_those_there(tmp_path: Path) -> None:
    wanted = {"data.text": "content"}
    for path in (write_csv(tmp_path / "a.csv"), write_parquet(tmp_path / "a.parquet"), save_dataset(tmp_path / "s")):
        refused("data.text: .* has no field 'content'; it has text, label, other; write data.text=", path, wanted)
    (tmp_path / "a.txt").write_text("only text")
    refused("a.txt is a text file, which has no field 'label'", tmp_path / "a.txt", BOTH)
    refused("data.split: .* no split 'trian'; did you mean 'train'", save_dataset(tmp_path / "d", True), split="trian")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has file names that are not UTF-8")
def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("some text")
    assert read(tmp_path) == read(tmp_path / os.fsdecode(b"\xff.txt"))
    assert opened(tmp_path).fingerprint != opened(tmp_path / os.fsdecode(b"\xff.txt")).fingerprint


def test_a_folder_with_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    refused("holds no text, JSONL, CSV or Parquet file", tmp_path)


def test_an_unknown_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("cannot be read as a Hugging Face dataset", "nobody/nothing")
    assert "'nobody/nothing'" in message
    assert "it is not cached, and the Hugging Face hub cannot be reached" in message
    refused("did you mean 'stdlib'", "stdlb")


def test_a_dataset_of_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        assert datasets.config.HF_HUB_OFFLINE  # else the library's client tries again for half a minute
        raise ConnectionError

    monkeypatch.setattr("tightfit.hub.getproxies", lambda: {"https": "http://127.0.0.1:9"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused("it is not cached, and the Hugging Face hub cannot be reached", "nobody/nothing")
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_hugging_face_dataset_is_asked_for_by_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read("owner/name", BOTH, config="small", split="train[:10%]")
    assert rows == [(row["text"], row["label"]) for row in ROWS]
    assert asked == [(("owner/name", "small"), {"split": "train[:10%]", "cache_dir": str(CACHE / "datasets")})]


def test_what_the_library_downloads_or_makes_lies_in_the_cache(tmp_path: Path) -> None:
    from tightfit.data.corpora import _load

    (tmp_path / "repository").mkdir()
    write_parquet(tmp_path / "repository" / "train.parquet")
    loaded = _load(Data(source=str(tmp_path / "repository"), split="train[:3]"), None, tmp_path / "cache")
    assert loaded["text"][:] == [row["text"] for row in ROWS[:3]]
    assert all(Path(entry["filename"]).is_relative_to(tmp_path / "cache") for entry in loaded.cache_files)
    assert loaded.cache_files


@pytest.mark.parametrize(
    ("documents", "fraction", "expected"),
    [(100, 0.05, 5), (3, 0.05, 1), (2, 0.9, 1), (10, 0.99, 9), (1, 0.5, 0), (0, 0.5, 0), (9, 0.0, 0)],
)
def test_held_out_share(documents: int, fraction: float, expected: int) -> None:
    chosen = held_out(documents, fraction)
    assert (len(chosen), int(chosen.sum())) == (documents, expected)
    assert (chosen == held_out(documents, fraction)).all()


def test_held_out_documents_lie_everywhere() -> None:
    places = held_out(10_000, 0.1).nonzero()[0]
    assert [len(places[(places >= i) & (places < i + 1000)]) > 50 for i in range(0, 10_000, 1000)] == [True] * 10


def test_a_single_text_is_cut_behind_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    begin, end = split_text(text, 0.1)
    assert begin + end == text
    assert begin.endswith("\n")
    assert 0.08 < len(end) / len(text) < 0.2
    assert split_text("ab", 0.01) == ("a", "b")
