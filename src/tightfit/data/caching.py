"""A cache of folders: each is named by a digest of its inputs, and written whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tightfit.errors import DataError, remedy
from tightfit.files import digest, system_errors, unfinished_folder

Read = TypeVar("Read")


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """A name for the contents of files and the names they are given. Raises DataError for an unreadable file."""
    parts: list[str | bytes] = []
    for name, path in files:
        try:
            with path.open("rb") as file:
                parts += name, hashlib.file_digest(file, hashlib.blake2b).digest()
        except OSError as error:
            raise DataError(f"data: {path} cannot be read: {error.strerror}") from None
    return digest(parts)


def cached(folder: Path, fill: Callable[[Path], None], read: Callable[[Path], Read]) -> Read:
    """The cached `folder` as `read` gives it. If it is not there, or damaged so that `read` raises, `fill` makes it in
    a temporary folder that is renamed when finished.

    Raises DataError where the cache cannot be written.
    """
    if folder.is_dir():
        try:
            return read(folder)
        except (OSError, ValueError, EOFError, DataError):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(folder.parent.resolve(), "unfinished") as temporary:
            made = temporary / folder.name
            made.mkdir()
            with system_errors():
                fill(made)
            try:
                made.replace(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process made the same folder first
                    raise
    except OSError as error:
        raise DataError(f"cache_dir: cannot write {folder}: {error.strerror or error}; "
                        f"{remedy(error, 'write cache_dir=<a folder with room>')}") from None
    return read(folder)
