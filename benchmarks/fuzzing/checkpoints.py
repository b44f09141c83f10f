"""Folders of runs that are damaged, or a stranger's: the run goes on to the very weights, or says in one message why
not; so does a report of it, which shows names as text and runs no pickle."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import signal
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from tests.training.runs import same_weights

from fuzzing.harness import Kind, fault, run_command
from fuzzing.models import MOST_BYTES, Touch
from fuzzing.runs import RUN, trained
from tightfit.training.listeners import Listener
from tightfit.training.trainer import Trainer

SCRIPT = "<script>alert(7)</script>"
BOMB = 1 << 30
"""Bytes that a few compressed ones stand for."""
VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1e400, "", SCRIPT, "../../x", [], {}, [SCRIPT], {"x": SCRIPT},
                           "x" * 100_000)


class StopAtFive(Listener):
    """Ends a run as a person does."""

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def base(folder: Path) -> None:
    """A run that is complete, with a profile; the same one stopped at its fifth step, and one with another seed."""
    os.chdir(folder)
    profiled = {**RUN, "save_steps": 4, "profile_step": 5}
    for name, seed in (("stopped", 0), ("stranger", 1)):
        Trainer(recipe={**profiled, "seed": seed, "output_dir": name, "profile_step": None},
                listener=StopAtFive()).train()
    trained({**profiled, "output_dir": "whole"})


def some_file(draw: random.Random, run: Path) -> Path:
    """A file of a run."""
    return draw.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock"))


def spoil(draw: random.Random, run: Path, stranger: Path) -> None:
    """Damage a file, with nothing of what it holds understood."""
    path = some_file(draw, run)
    raw = path.read_bytes()
    place = draw.randrange(len(raw) + 1)
    kind = draw.randrange(9)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(raw[:place])
    elif kind == 2 and raw:
        place = min(place, len(raw) - 1)
        path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << draw.randrange(8))]) + raw[place + 1 :])
    elif kind == 3:
        bomb = gzip.compress(b"0" * BOMB, 1) if draw.random() < 0.1 else b"{"
        path.write_bytes(draw.choice((b"", b"\x00" * 100, draw.randbytes(300), bomb)))
    elif kind == 4:
        path.unlink()
        path.mkdir()
    elif kind == 5:
        path.unlink()
        path.symlink_to(draw.choice(("/dev/null", "nowhere", path.name, "/")))
    elif kind == 6:
        path.write_bytes(raw + draw.randbytes(20))
    elif kind == 7:
        other = stranger / path.relative_to(run)
        if other.is_file():
            shutil.copy(other, path)
    else:
        (run / "extra").mkdir()
        torch.save(Touch(run.parent / "executed"), path)


def leaves(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to the values inside of values."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(leaf for key, value in pairs for leaf in leaves(value, (*path, key)))]


def mutate(draw: random.Random, run: Path, stranger: Path) -> None:
    """Change a value in a file that is understood."""
    endings = (".json", ".yaml", ".jsonl", ".gz")
    texts = [path for path in run.rglob("*") if path.suffix in endings and path.is_file() and not path.is_symlink()]
    path = draw.choice(sorted(texts))
    raw = path.read_bytes()
    if path.suffix == ".gz" and raw[:2] == b"\x1f\x8b":
        with suppress(EOFError, OSError, zlib.error):
            raw = gzip.decompress(raw)
    lines = path.suffix in (".jsonl", ".gz")
    try:
        whole = yaml.safe_load if path.suffix == ".yaml" else json.loads
        values: Any = [json.loads(line) for line in raw.splitlines()] if lines else whole(raw)
        *way, last = draw.choice([leaf for leaf in leaves(values) if leaf])
    except (ValueError, IndexError, yaml.YAMLError):  # of what another way left here
        return
    place = values
    for step in way:
        place = place[step]
    if isinstance(place, dict) and draw.random() < 0.2:
        place[SCRIPT] = place.pop(last)
    else:
        place[last] = draw.choice(VALUES)
    if lines:
        text = "".join(json.dumps(line) + "\n" for line in values)
    else:
        text = yaml.safe_dump(values) if path.suffix == ".yaml" else json.dumps(values)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def rearrange(draw: random.Random, run: Path, stranger: Path) -> None:
    """Move whole checkpoints."""
    kind, kept = draw.randrange(6), run / "checkpoints"
    newest = max(kept.iterdir() if kept.is_dir() else (), default=None)
    if newest is None:  # which another way has removed
        return
    if kind == 0:
        newest.rename(kept / "step-00000007")
    elif kind == 1:
        shutil.copytree(newest, kept / "step-99999999")
    elif kind == 2:
        shutil.rmtree(kept)
    elif kind == 3:
        (run / "recipe.yaml").unlink()
    elif kind == 4:
        for name in ("step-", "step-x", "step-0000000٣", ".writing-step-00000006", SCRIPT.replace("/", "")):
            (kept / name).mkdir()
    else:
        newest.chmod(0)


WAYS: tuple[Callable[[random.Random, Path, Path], None], ...] = (spoil, spoil, mutate, mutate, rearrange)


def attempt(seed: int, folder: Path) -> str | None:
    """A run gone on with, or reported, after some damage."""
    draw = random.Random(seed)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    made, run = folder.parent / "base", folder / "run"
    reported = draw.random() < 0.5
    shutil.copytree(made / ("whole" if reported else "stopped"), run)
    ways = [draw.choice(WAYS) for _ in range(draw.choice((1, 1, 2)))]
    for way in ways:
        way(draw, run, made / "stranger")
    if reported:
        said = run_command("report", "run",
                           *draw.choice(((), (), (str(made / "whole"), "--output", "run/report.html"))))
    else:
        (folder / "mine.yaml").write_text(yaml.safe_dump({**RUN, "save_steps": 4}))
        said = run_command("train", "mine.yaml")
    wrong = fault(said)
    page = run / "report.html"
    if wrong is None and (folder / "executed").exists():
        wrong = "a pickle was run"
    if wrong is None and reported and page.is_file() and SCRIPT in page.read_text():
        wrong = "the report holds a script that a name held"
    if wrong is None and not reported and said.status == 0:
        wrong = None if same_weights(made / "whole", run) else "other weights than those of the run that nothing befell"
    return wrong and f"{wrong}\n{' '.join(way.__name__ for way in ways)}\n{said.out[-1500:]}\n{said.err[-500:]}"


KIND = Kind(attempt, quick=10, chunk=10, base=base)
