"""Every error that tightfit raises for a person to act on.

Broken invariants of our own are plain `assert`s and built-in exceptions: those are bugs, these are not.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import clear_frames
from types import MappingProxyType
from typing import Any

INSTALL: Mapping[str, str] = MappingProxyType({
    "accelerate": "'tightfit[distributed]'",
    "deepspeed": "'tightfit[deepspeed]'",
    "flash-attn": "flash-attn --no-build-isolation",
    "jax": "'tightfit[jax]'",
    "liger-kernel": "'tightfit[gpu]'",
    "nvidia-ml-py": "'tightfit[gpu]'",
    "optax": "'tightfit[jax]'",
    "peft": "'tightfit[peft]'",
    "pillow": "'tightfit[images]'",
    "tensorboard": "'tightfit[tensorboard]'",
})
"""Arguments of `pip install` for an optional library that has an extra, or a way of its own; any other is given by
its name."""


def install_command(library: str) -> str:
    return f"pip install {INSTALL.get(library, library)}"


class TightfitError(Exception):
    """Base of every error with a message written for the person running tightfit.

    status: the exit status of a program that it ends.
    """

    status = 2


class RecipeError(TightfitError):
    """A recipe's field name or value is wrong. The message names both, and what to write instead."""


class UnknownRecipe(RecipeError):
    """No recipe has that name. The message names what is close to it."""


class Refused(RecipeError):
    """A correct choice that this device, its libraries or another field cannot serve, with the reason."""


class DataError(TightfitError):
    """Data that cannot be read, is too small, or disagrees with the recipe."""


class ModelError(TightfitError):
    """A model that cannot be found, built, or transformed as the recipe asks."""


class CheckpointError(TightfitError):
    """A checkpoint that cannot be written, read, or continued from."""


class ReportError(TightfitError):
    """A trace or profile that cannot be made, written or read: a step that cannot be followed, a full disk, no such
    file, not one of these, damaged, or of a newer version."""


class MissingLibrary(TightfitError):
    """An optional library is needed; the message ends with the command that installs it.

    command: the one to run where it is not the library's own.
    """

    def __init__(self, library: str, purpose: str, command: str = "") -> None:
        super().__init__(library, purpose, command)  # what pickling hands to this method again

    def __str__(self) -> str:
        library, purpose, command = self.args
        return (f"{purpose} needs the library {library}, which is not installed; run: "
                f"{command or install_command(library)}")


class NonFiniteLoss(TightfitError):
    """The training loss became infinite or not a number."""


class OutOfMemory(TightfitError):
    """The device ran out of memory; the message says while doing what, and which recipe change would help."""


class LostProcess(TightfitError):
    """Another process of the run ended, or did not answer in time."""


class SaidElsewhere(TightfitError):
    """An error that another process of the run says, or the one that started them all; this one ends without a word."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text, status)
        self.status = status


def ending(error: BaseException) -> tuple[str, int]:
    """The message for an error that ends the program, and its exit status. Raises any other."""
    if isinstance(error, SaidElsewhere):
        return "", error.status
    left = error.__context__ if isinstance(error, SystemExit) else None
    causes = (error, error.__cause__, left and left.__cause__)  # as it comes, as pydantic wraps it, and as typer does
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return "interrupted", 130
    if isinstance(error, OSError) and (advice := limit_advice(error, "write elsewhere")):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}, and what was being written may be cut short; {advice}", 2
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # as pathlib says it
        return "caches have no place, for this user has no home folder; set HOME, or USERPROFILE on Windows", 2
    if not isinstance(error, TightfitError):
        raise error
    return str(error), error.status


def limit_advice(error: BaseException, elsewhere: str) -> str:
    """Advice on the limit of the system's that an error names: of space, for which one may also write `elsewhere`, of a
    file's size, or of open files. Empty for another error."""
    room, files = f"free some space, or {elsewhere}", "allow more open files by: ulimit -n 1024"
    limits = {errno.ENOSPC: room, errno.EDQUOT: room, errno.EFBIG: "allow larger files by: ulimit -f unlimited",
              errno.EMFILE: files, errno.ENFILE: files}
    return next((advice for number, advice in limits.items()  # libraries in Rust give the text alone
                 if getattr(error, "errno", None) == number or os.strerror(number) in str(error)), "")


def remedy(error: OSError, elsewhere: str) -> str:
    """Advice on what cannot be written: on the limit that the error names, or to write `elsewhere`."""
    return limit_advice(error, elsewhere) or elsewhere


@contextmanager
def writing(what: str, advice: str) -> Iterator[None]:
    """Context that writes files; raises ReportError, which names `what` and ends in `advice`, where one cannot be."""
    try:
        yield
    except OSError as error:
        raise ReportError(f"{what} cannot be written ({error.strerror or error}); "
                          f"{remedy(error, advice)}") from None


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames that raised an error, and those of the errors that came before it."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice closest to `word`; None where none is close. Letters in another order are closest, then what begins
    with the word."""
    choices = sorted(choices)
    close = [c for c in choices if sorted(c) == sorted(word)]
    close = close or difflib.get_close_matches(word, choices, n=max(len(choices), 1), cutoff=0.6)
    return next((c for c in close if c.startswith(word)), close[0]) if close else None


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence naming the choice closest to `word`, or all choices where none is close."""
    choices = sorted(choices)
    close = closest(word, choices)
    return "choose from: " + ", ".join(choices) if close is None else f"did you mean {close!r}?"


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks, at most 300 characters long."""
    return cut(" ".join(str(error).split()) or type(error).__name__, 300)


def last_words(output: str) -> str:
    """The line in which a process that failed seems to say why: the last of an error, fatal ones of XLA's log among
    them, or else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    of_errors = [line for line in lines if "Error" in line or "error" in line or re.match(r"F\d{4} |Fatal", line)]
    return (of_errors or lines or [""])[-1][-400:]


def shown(value: Any) -> str:
    """A value as a person wrote it, cut where it is long."""
    return cut(repr(value))


def cut(text: str, most: int = 100) -> str:
    """A text, or so many characters of its beginning."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
