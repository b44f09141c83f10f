"""Figures are of what a recipe names as it is on the disk, and not of its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ladder.climbs import DONE, Processes, how, use
from tightfit.ladder.climbing import climb
from tightfit.ladder.contents import contents, sources
from tightfit.ladder.from_recipe import ladder_of
from tightfit.recipe import Recipe

PACKAGE = {
    "own/__init__.py": "", "own/models/__init__.py": "from . import layers", "own/models/made.py":
    "import torch, helpers\nfrom ..sizes import WIDE\nfrom own.more import depth as deep\ndef make():\n import late\n",
    "own/models/layers.py": "", "own/sizes.py": "from own.models.made import *", "own/more/__init__.py": "",
    "own/more/depth.py": "x = '\\d'", "own/unused.py": "", "helpers.py": "this is no Python", "late.py": "",
    "other.py": "", "torch_like.py": "",
}  # fmt: skip
UNUSED = {"own/unused.py", "other.py", "torch_like.py"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of one's own, a model's folder, a tokenizer's and data."""
    monkeypatch.chdir(tmp_path)
    for name, text in {**PACKAGE, "model/config.json": "{}", "model/model.safetensors": "w", "words/tokenizer.json": "",
                       "texts/a/one.txt": "one", "texts/two.txt": "two", "data.txt": "text"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def of(**fields: Any) -> str | None:
    return contents(Recipe.from_dict({"model": "gpt2", "vocab_size": 64, **fields}))


@pytest.mark.parametrize("fields", [
    {}, {"data": "dummy"}, {"tokenizer": "train"}, {"model": "no/such"}, {"model": "nothing"}, {"data": "hub/dataset"},
    {"model": "gone.module:make"}, {"model": "sys:exit"},
], ids=str)  # fmt: skip
def test_what_is_not_on_the_disk_has_no_content(place: Path, fields: dict[str, Any]) -> None:
    for name in ("dummy", "train", "auto", "stdlib"):
        (place / name).write_text("no field means this")
    assert of(**fields) is None


@pytest.mark.parametrize(("fields", "changed", "left"), [
    ({"model": "own.models.made:make"}, sorted(PACKAGE.keys() - UNUSED), sorted(UNUSED)),
    ({"model": "late:make"}, ["late.py"], ["helpers.py"]),
    ({"model": "./model"}, ["model/config.json", "model/model.safetensors"], []),
    ({"tokenizer": "words"}, ["words/tokenizer.json"], []),
    ({"tokenizer": "words/tokenizer.json"}, ["words/tokenizer.json"], []),
    ({"data": "data.txt"}, ["data.txt"], []), ({"data": "texts"}, ["texts/a/one.txt", "texts/two.txt"], []),
], ids=["factory", "lone-module", "model", "tokenizer", "tokenizer-file", "file", "folder"])  # fmt: skip
def test_what_counts(place: Path, fields: dict[str, Any], changed: list[str], left: list[str]) -> None:
    before = of(**fields)
    assert before is not None
    for name in left:
        (place / name).write_text("# another\n")
        assert of(**fields) == before, name
    for name in changed:
        old, path = (place / name).read_text(), place / name
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_text(f"{old}\n# another")
        assert of(**fields) != before, name
        path.write_text(old)
        os.utime(path, ns=times)
        assert of(**fields) == before, name


def test_code_and_configurations_count_by_what_they_say(place: Path) -> None:
    before = of(model="./model"), of(model="own.models.made:make"), of(data="data.txt")
    for name in ("model/config.json", "own/models/made.py", "data.txt"):
        os.utime(place / name, (1, 1))
    after = of(model="./model"), of(model="own.models.made:make"), of(data="data.txt")
    assert after[:2] == before[:2]
    assert after[2] != before[2]


def test_an_installed_module_counts_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = place / "lib/site-packages"
    installed.parent.mkdir()
    (place / "own").rename(place / "kept")
    installed.mkdir()
    (place / "kept").rename(installed / "own")
    monkeypatch.syspath_prepend(installed)
    own = installed.resolve() / "own"
    assert sources("own.models.made") == {
        own / "__init__.py", own / "models/__init__.py", own / "models/made.py"}  # fmt: skip


def test_nothing_is_imported(place: Path) -> None:
    (place / "own/__init__.py").write_text("raise SystemExit(9)")
    assert len(sources("own.models.made")) == len(PACKAGE) - len(UNUSED)
    assert "own" not in sys.modules


def test_a_model_that_was_changed_is_measured_and_predicted_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.from_dict({"model": "late:make", "vocab_size": 64, "data": "dummy"})

    def go() -> tuple[int, int]:
        made = use(monkeypatch, Processes(lambda job: DONE))
        climb(how(ladder_of(recipe, "mine"), "full", place / "out"), lambda text: None)
        return made.ran(), len(made.foretold)

    every = go()
    assert min(every) > 1
    assert go() == (0, 0)
    (place / "late.py").write_text("wider = True")
    assert go() == every
    (place / "late.py").write_text("")
    assert go() == (0, 0)
