"""Files and folders that are whole or not there: written under a temporary name, which then takes the place of the
real one."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

import psutil

from tightfit.errors import TightfitError, one_line
from tightfit.system import lock_file

WRITING = ".writing"
"""Suffix of the name of what is not yet whole; where a process was killed, it stays."""
LOCK = ".lock"
"""Suffix of the file that is locked while the folder beside it is filled."""
SYSTEM_ERROR = re.compile(r"os error (\d+)|Os \{ code: (\d+)")
"""The number of the system's error in the messages of libraries written in Rust."""


@contextmanager
def system_errors() -> Iterator[None]:
    """Context that writes files. Raises OSError, with its number, also where a library such as `tokenizers` or
    `safetensors` raises an exception of its own for what the system says."""
    try:
        yield
    except (OSError, TightfitError):
        raise
    except Exception as error:
        found = SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1] or found[2])
        raise OSError(number, one_line(error), None, number) from error  # the last is the number's meaning on Windows


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


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it takes the place of `path`, and of all that this holds, once all of it is there, or
    is removed. Raises OSError that names `path`."""
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.exists() and not path.is_dir():
        raise OSError(errno.ENOTDIR, "it is no folder", str(path))
    temporary, before = path.with_name(f".{path.name}.{os.getpid()}{WRITING}"), _put_aside(path)
    try:
        with system_errors():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for inside in (*temporary.rglob("*"), temporary):
                flush(inside)
            if path.exists():  # no system replaces a folder that holds anything
                path.rename(before)
            temporary.rename(path)
            flush(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        remove_unfinished(path)


def final_path(path: Path) -> Path:
    """The final place of a path inside a folder that `replacing_folder` fills, once that is whole; any other itself."""
    parts = [part[1:].rsplit(".", 2)[0] if part.startswith(".") and part.endswith(WRITING) else part
             for part in path.parts]
    return Path(*parts)


def _put_aside(path: Path) -> Path:
    """The name of a folder while another one takes its place."""
    return path.with_name(f".{path.name}.before{WRITING}")


def flush(path: Path) -> None:
    """Have a file or folder written to the disk itself."""
    if os.name == "nt" and path.is_dir():  # which knows no such thing
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed left of a file or folder, where nobody else may write it. A folder that
    was put aside for one that never came has its name again."""
    with suppress(OSError):
        if not path.exists():
            _put_aside(path).rename(path)
    for left in path.parent.glob(f".{escape(path.name)}.*{WRITING}"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with suppress(OSError):
                left.unlink()


@contextmanager
def unfinished_folder(parent: Path, name: str) -> Iterator[Path]:
    """A temporary folder in `parent`, locked while it is filled and removed in the end; what processes that were killed
    left of such folders of that name goes first. Raises OSError."""
    # Whose locks this process could take again: the system's are between processes. In each container one has pid 1.
    own = f"-{os.getpid()}-{psutil.Process().create_time():.0f}-"
    for left in (path for path in parent.glob(f".{name}-*{LOCK}") if own not in path.name):
        with suppress(OSError), left.open("r+") as file:  # of one that is being filled, or another user's
            lock_file(file)
            shutil.rmtree(left.with_suffix(""), ignore_errors=True)
            left.unlink()
    with ExitStack() as held:
        lock = _new_lock(parent, f".{name}{own}", held)
        temporary = lock.with_suffix("")
        try:
            temporary.mkdir()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            held.close()  # Windows removes no open file
            with suppress(OSError):
                lock.unlink()


def _new_lock(parent: Path, prefix: str, held: ExitStack) -> Path:
    """A new file of that prefix, locked until `held` ends; not where the file system knows no locks."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(4)}{LOCK}"
        try:
            if lock_path(path, held):
                return path
        except BlockingIOError:  # by whoever takes it for left behind, for it was not locked yet
            pass
        except OSError:
            return path


def lock_path(path: Path, held: ExitStack) -> bool:
    """Lock a file, made where there is none, until `held` ends; False where another process has removed it meanwhile,
    so that the next may make it anew. Raises OSError as `lock_file`."""
    file = held.enter_context(path.open("a"))
    lock_file(file)
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


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
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part  # as of a file's odd name
        result.update(len(raw).to_bytes(8, "little"))
        result.update(raw)
    return result.hexdigest()
