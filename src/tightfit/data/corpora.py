"""Corpora of documents: the standard library's source, files, folders, saved and Hugging Face datasets."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.data.caching import files_digest
from tightfit.data.readers import OPTIONAL, READERS, TEXT, Row, Wanted, decode, picked, read_file, require_fields
from tightfit.errors import DataError, closest, nearest, one_line
from tightfit.files import digest
from tightfit.recipe import Data

SKIPPED = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings", "pydoc_data",
})
"""Folders of the standard library that are left out: other people's packages, tests, test data, generated tables."""

SAVED_SPLITS = "dataset_dict.json"
SAVED = ("state.json", SAVED_SPLITS)
"""Files that `datasets.save_to_disk` writes: with a dataset, and with a folder of splits."""


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read more than once, in the same order each time.

    name: for messages. fingerprint: names the content. rows: the wanted values of every document.
    """

    name: str
    fingerprint: str
    rows: Callable[[], Iterator[Row]]


def open_corpus(data: Data, wanted: Wanted, cache_dir: Path) -> Corpus:
    """The documents that `data` names, reading the `wanted` fields. Raises DataError for what is not there.

    cache_dir: where the library `datasets` keeps what it downloads.
    """
    if data.source == "stdlib":
        return _stdlib(wanted)
    if not data.source:
        raise DataError("data: the source is empty; write stdlib, dummy, a file, a folder or a Hugging Face dataset id")
    path = Path(data.source).expanduser()
    if path.is_file():
        return Corpus(str(path), files_digest([(path.suffix.lower(), path)]), lambda: read_file(path, wanted))
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED):
            return _dataset(str(path), _load(data, path, cache_dir), wanted, data)
        return _folder(path, wanted)
    if path.exists():
        raise DataError(f"data: {data.source!r} is not a regular file; write a file, a folder, stdlib or dummy")
    if _looks_like_path(data.source, path):
        raise missing_path("data", data.source, path)
    return _dataset(data.source, _load(data, None, cache_dir), wanted, data)


def given_corpus(rows: Any, wanted: Wanted, name: str) -> Corpus:
    """Rows of the caller's own, which have a number and are read by theirs, as documents."""
    def read() -> Iterator[Row]:
        return picked((rows[number] for number in range(len(rows))), wanted, name)

    return Corpus(name, digest(map(repr, read())), read)


def evaluation_data(data: Data) -> Data | None:
    """The held-out data that the recipe names; None where it names none."""
    if data.eval_source is None and data.eval_split is None:
        return None
    return data.model_copy(update={"source": data.eval_source or data.source, "split": data.eval_split or data.split})


def check_named_parts(data: Data) -> None:
    """Raise DataError for a split or a configuration of a source that has none, which would be passed over."""
    usual = type(data).model_fields
    held = data.eval_source or data.source
    for field, sources, has, what, write in (
        ("split", (data.source, held), _has_splits, "splits", "leave it out, or write data=<that part's file>"),
        ("eval_split", (held,), _has_splits, "splits", "write data.eval_source=<a file or folder>, or leave it out"),
        ("config", (data.source, held), _on_hub, "configurations", "leave it out, or write data=<a Hugging Face id>"),
    ):
        if (value := getattr(data, field)) != usual[field].default and not any(has(source) for source in sources):
            raise DataError(f"data.{field}: {value!r} is asked for, and {sources[0]!r} has no {what}; {write}")


def missing_path(field: str, value: str, path: Path) -> DataError:
    """The error for a path that does not exist, with the nearest name in its folder."""
    folder = path.parent
    while not folder.is_dir():
        if folder == folder.parent:  # a drive of Windows
            return DataError(f"{field}: {value!r} does not exist; there is no {folder}")
        path, folder = folder, folder.parent
    names = [entry.name for entry in folder.iterdir()]
    close = closest(path.name, names)
    held = f"holds {len(names)} other names" if names else "is empty"
    hint = f"did you mean {close!r}?" if close else f"{folder.resolve()} {held}"
    return DataError(f"{field}: {value!r} does not exist; {hint}")


def is_path(name: str) -> bool:
    """Whether a name can only be a path: a Hugging Face id is `name` or `owner/name`."""
    return name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name


def _on_hub(source: str) -> bool:
    """Whether a source is none of this machine's."""
    return source not in ("stdlib", "dummy") and not Path(source).expanduser().exists()


def _has_splits(source: str) -> bool:
    return _on_hub(source) or (Path(source).expanduser() / SAVED_SPLITS).is_file()


def _looks_like_path(source: str, path: Path) -> bool:
    """True for a source that was meant as a path, though none is there."""
    known = path.suffix.lower() in {*READERS, ".txt", ".md", ".py"}
    has_folder = path.parent != Path() and path.parent.is_dir()
    return known or has_folder or is_path(source)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Files below `root` in a fixed order, hidden ones left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        found += [Path(folder) / name for name in sorted(names) if not name.startswith(".")]
    return found


def _text_of(path: Path) -> str | None:
    """A file's text, or None where it has none."""
    with suppress(DataError):
        return decode(path.read_bytes(), path)
    return None


def _stdlib(wanted: Wanted) -> Corpus:
    if wanted.keys() != {TEXT}:
        fields = ", ".join(f"{key}={field}" for key, field in wanted.items() if key not in (TEXT, *OPTIONAL))
        raise DataError(f"data: stdlib has text only, and {fields} is to be read; write data=<a JSONL file>")
    root = Path(sysconfig.get_path("stdlib"))
    files = [(p.relative_to(root).as_posix(), p) for p in _walk(root, SKIPPED) if p.suffix == ".py"]
    if not files:
        raise DataError("data: this Python has no standard library source; write data=<a file or folder>")
    return Corpus("stdlib", files_digest(files), lambda: ((text,) for _, path in files if (text := _text_of(path))))


def _folder(folder: Path, wanted: Wanted) -> Corpus:
    """Every readable file below `folder`; binary and empty files, and links to nothing, are passed over."""
    known = {p: p.suffix.lower() in READERS for p in _walk(folder) if p.is_file() and p.stat().st_size}
    files = [(p.relative_to(folder).as_posix(), p) for p, tabular in known.items() if tabular or _text_of(p)]
    if not files:
        raise DataError(f"data: {folder} holds no text, JSONL, CSV or Parquet file with anything in it")
    return Corpus(str(folder), files_digest(files), lambda: (r for _, path in files for r in read_file(path, wanted)))


def _load(data: Data, saved: Path | None, cache_dir: Path) -> Any:
    """A Hugging Face dataset, or the one `saved` in a folder. Raises DataError for whatever goes wrong in the library
    or on the network."""
    import datasets

    from tightfit.hub import only_local

    try:
        if saved is None:
            kept = str(cache_dir / "datasets")
            with _offline(datasets.config) if only_local(data.source) else nullcontext():
                return datasets.load_dataset(data.source, data.config, split=data.split, cache_dir=kept)
        splits = datasets.load_from_disk(str(saved))
    except Exception as error:
        close = closest(data.source, ("stdlib", "dummy", *(entry.name for entry in Path().iterdir())))
        meant = f"did you mean {close!r}?" if close else "write data=<a file or folder>, or data=stdlib"
        reason = one_line(error)
        if isinstance(error, ConnectionError):
            reason = "it is not cached, and the Hugging Face hub cannot be reached"
        raise DataError(
            f"data: {data.source!r} is not a file or folder here, and cannot be read as a Hugging Face dataset: "
            f"{reason}; {meant}"
        ) from None
    if not isinstance(splits, datasets.DatasetDict):
        return splits
    if data.split not in splits:
        raise DataError(f"data.split: {saved} has no split {data.split!r}; {nearest(data.split, splits)}")
    return splits[data.split]


@contextmanager
def _offline(config: Any) -> Iterator[None]:
    """Context in which the library `datasets`, of that configuration, reads its cache alone, as no argument asks of
    it."""
    said, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = said


def _dataset(name: str, dataset: Any, wanted: Wanted, data: Data) -> Corpus:
    require_fields(wanted, dataset.column_names, name)
    columns = dataset.select_columns([field for field in wanted.values() if field in dataset.column_names])
    stored = [("", Path(entry["filename"])) for entry in dataset.cache_files]
    table = files_digest(stored) if stored else digest(map(repr, columns))
    # Every split that is a slice of the same stored table has its digest.
    fingerprint = digest((table, data.split, str(len(dataset))))
    return Corpus(name=name, fingerprint=fingerprint, rows=lambda: picked(columns, wanted, name))
