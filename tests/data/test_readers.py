"""Files of JSON that hold one array, and files that are something else than their names say."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path

import pytest

from tests.data.test_corpora import BOTH, ROWS, read, refused


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_objects_is_its_rows(indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(codecs.BOM_UTF8 + b"\n" + json.dumps(ROWS, indent=indent).encode())
    assert read(path, BOTH) == [(row["text"], row["label"]) for row in ROWS]


def test_broken_rows_of_an_array_are_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, says in (
        ('[{"text": "fine"}, 7]', "a.json row 2 is not an object such as .* write one a row"),
        ('[{"text": "fine"}, {"text": 5}]', "data.text: field 'text' of .*a.json row 2 is 5, not text"),
        ('[{"text": "fine"}, {"body": "x"}]', "data.text: .*row 2 has no field 'text'; it has body"),
        (r'[{"text": "a\ud800b"}]', "a.json row 1 is not JSON in UTF-8: .*surrogates not allowed"),
        ('[{"text": "fine"},', "a.json, which begins as an array, is not JSON in UTF-8: .*line 1"),
        ('[{"text": "fine"}]\n[]', "a.json, which begins as an array, is not JSON in UTF-8: Extra data: line 2"),
        ("[" * 100_000, "a.json, which begins as an array, is not JSON"),
        ("[]", "a.json has no rows"),
    ):
        path.write_text(text)
        refused(says, path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.parquet"])
def test_what_a_file_is_by_its_first_bytes_is_said(name: str, tmp_path: Path) -> None:
    text = '{"text": "fine"}\n'
    for raw, says in (
        (gzip.compress(text.encode()), "is compressed by gzip; write the file that gunzip makes of it"),
        (codecs.BOM_UTF16_LE + text.encode("utf-16-le"), "is text in UTF-16; convert it to UTF-8"),
        (codecs.BOM_UTF16_BE + text.encode("utf-16-be"), "is text in UTF-16; convert it to UTF-8"),
        (codecs.BOM_UTF32_LE + text.encode("utf-32-le"), "is text in UTF-32; convert it to UTF-8"),
    ):
        (tmp_path / name).write_bytes(raw)
        refused(f"{name} {says}", tmp_path / name)
