"""Seeds run in forked processes, and the judgement of what a command said."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from unittest import mock

import typer

from forking import Job, run_forked
from tightfit.backends import quiet_loading
from tightfit.errors import TightfitError

HANGS_AFTER = 60.0
"""Seconds after which a seed counts as hanging."""
LONGEST, LINES = 4000, 6
"""The most characters and lines of an error."""
COUNTED = "counted"
"""The file in which attempts count."""
WARNING = re.compile(r"^\S*:\d+: \w*Warning: ", re.MULTILINE)

PARSER = cache(typer.main.get_command)
"""Reads the command line; made once, which takes as long as what most seeds do."""


@dataclass(frozen=True)
class Kind:
    """A kind of input. attempt: tries a seed in an empty folder; None, or what went wrong. quick: how many seeds a
    minute's run over all kinds takes. chunk: seeds that share a process. base: makes once, in a process of its own,
    the folder that all seeds begin from, which `attempt` finds beside its own as `../base`. seconds: a seed may take.
    seeds: how many there are; 0 where they do not end. shared: modules that its processes share, imported before.
    counted: how often each thing befell that attempts `count`."""

    attempt: Callable[[int, Path], str | None]
    quick: int
    chunk: int = 1
    base: Callable[[Path], None] | None = None
    seconds: float = HANGS_AFTER
    seeds: int = 0
    shared: tuple[str, ...] = ()
    counted: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Said:
    """Outcome of a command. error: an exception that reached its caller, as a traceback."""

    status: object
    out: str
    err: str
    error: str = ""


def run_command(*words: str) -> Said:
    """The command line, in this process."""
    from tightfit.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["tightfit", *words]
    status: object = 0
    error = ""
    try:
        with redirect_stdout(out), redirect_stderr(err), mock.patch("typer.main.get_command", PARSER):
            main()
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        error = traceback.format_exc()
    finally:
        sys.argv = before
    return Said(status, out.getvalue(), err.getvalue(), error)


def fault(said: Said, statuses: Sequence[int] = (0, 2)) -> str | None:
    """Fault in how a command ended: it does what it was asked to, or says in one message why not."""
    if said.error:
        return said.error
    text = said.out + said.err
    if said.status not in statuses:
        return f"status {said.status}: {text[-1500:]}"
    if "Traceback (most recent call last)" in text:
        return text[-1500:]
    if found := WARNING.search(text):
        return f"a warning: {text[found.start():][:1500]}"
    if said.status != 2:
        return None
    if "─ Error ─" in said.err:  # of the command line's own parser
        return None
    _, tightfit, message = said.err.partition("tightfit: ")
    return message_fault(message.rstrip("\n")) if tightfit else f"status 2 and no message: {text[-1500:]}"


def message_fault(message: str) -> str | None:
    """Fault in an error's message."""
    if len(message) > LONGEST or message.count("\n") >= LINES:
        return f"a message of {len(message)} characters in {message.count(chr(10)) + 1} lines: {message[:300]} ..."
    return None if message.strip() else "an empty message"


def tried(work: Callable[[], str | None]) -> str | None:
    """Fault in the outcome of a call; it may raise an error that has a message for a person."""
    try:
        return work()
    except TightfitError as error:
        return message_fault(str(error))
    except Exception:
        return traceback.format_exc()


def count(folder: Path, what: str) -> None:
    """Note, for the record, something that befell in the folder of a seed."""
    with (folder.parent / COUNTED).open("a") as file:
        file.write(what + "\n")


def run_seeds(kind: Kind, seeds: Iterable[int], deadline: float | None = None) -> Iterator[tuple[int, str | None]]:
    """Each seed with what went wrong, None where nothing did. deadline: of time.monotonic, for the last to begin."""
    with quiet_loading():
        for name in kind.shared:
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        folder = Path(scratch)
        if kind.base is not None:
            base = kind.base

            def made() -> None:
                (folder / "base").mkdir()
                base(folder / "base")

            (outcome,) = run_forked([Job("base", made, 10 * HANGS_AFTER)])
            if outcome.failure is not None:
                raise SystemExit(f"what the seeds begin from cannot be made: {outcome.failure}")

        def job(chunk: Sequence[int], seconds: float) -> Job:
            return Job(",".join(map(str, chunk)), lambda: [_in_folder(kind, seed, folder) for seed in chunk], seconds)

        left = iter(seeds)
        chunks = iter(lambda: list(islice(left, kind.chunk)), [])
        in_time = takewhile(lambda _: deadline is None or time.monotonic() < deadline, chunks)
        for outcome in run_forked(job(chunk, kind.seconds * min(len(chunk), 5)) for chunk in in_time):
            names = [int(name) for name in outcome.name.split(",")]
            if (counted := folder / COUNTED).exists():
                kind.counted.update(counted.read_text().splitlines())
                counted.unlink()
            found = [outcome.failure] * len(names) if outcome.failure is not None else outcome.value
            failed = [name for name, wrong in zip(names, found, strict=True) if wrong is not None]
            if len(names) > 1 and failed:  # which of them it was, and whether it is so by itself
                again = run_forked([job([seed], kind.seconds) for seed in failed])
                alone = {int(one.name): one.failure if one.failure is not None else one.value[0] for one in again}
                found = [alone.get(name) for name in names]
            yield from zip(names, found, strict=True)


def _in_folder(kind: Kind, seed: int, scratch: Path) -> str | None:
    with tempfile.TemporaryDirectory(prefix=f"{seed}-", dir=scratch, ignore_cleanup_errors=True) as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            return tried(lambda: kind.attempt(seed, Path(folder)))
        finally:
            os.chdir(before)
            with suppress(OSError):
                for path in Path(folder).rglob("*"):
                    path.chmod(0o700)
