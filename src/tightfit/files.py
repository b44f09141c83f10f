"""Files that are whole or not there: written under a temporary name, which then takes the place of the real one."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITING = ".writing"
"""Suffix of the name of what is not yet whole; where a process was killed, it stays."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under; it takes the place of `path` once all of it is there, or is removed.

    A link stays, and what it leads to is replaced. Raises OSError that names `path`, as that of a full disk does not by
    itself; so for what is there and is no file, such as a device.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # which stops where links go round
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}{WRITING}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed left of a file, where nobody else may write it."""
    for left in path.parent.glob(f".{path.name}.*{WRITING}"):
        with suppress(OSError):
            left.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a whole text file under a temporary name, then give it its own. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def follow_umask(folder: Path) -> None:
    """Give a folder's safetensors files the mode of any new file; the library writes them for their owner alone."""
    new = folder / ".new"
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def digest(parts: Iterable[str | bytes]) -> str:
    """A name for the sequence `parts`: 32 hexadecimal digits that differ where any part does."""
    result = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        result.update(len(raw).to_bytes(8, "little"))
        result.update(raw)
    return result.hexdigest()
