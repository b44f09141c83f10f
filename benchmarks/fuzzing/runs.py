"""Tiny runs that are trained in processes of their own."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.training.runs import logged_losses, same_weights, train

from tightfit.training.loop import TrainingLoop

BY_BLOCK = {"accumulation": "by-block", "update": "with-forward"}
DROPOUT = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.1)
RUN: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, **DROPOUT},
    "vocab_size": 300, "data": {"source": "dummy", "samples": 21}, "seq_len": 16, "batch_size": 8,
    "micro_batch_size": 3, "max_steps": 8, "save_steps": 1, "learning_rate": 1e-2, "warmup_steps": 2,
    "logging_steps": 1, "device": "cpu", "output_dir": "run", "cache_dir": "cache", "loading": {"workers": 0},
}  # fmt: skip
"""A run with dropout, several epochs, ragged global batches, warm-up and clipping: everything that could drift."""
JAX = {
    "backend": "jax", "model": "transformer-156m", "vocab_size": 64, "seq_len": 8, "batch_size": 4,
    "model_overrides": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "max_seq_len": 12,
                        "dropout_rate": 0.1},
    "micro_batch_size": 2, "data": {"source": "dummy", "samples": 10},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "8 bit": {"optimizer": "adamw-8bit"}, "fp16": {"precision": "fp16"}, "by block": BY_BLOCK,
    "adapter": {"trainable": {"name": "lora", "dropout": 0.1}, "base": "nf4", "precision": "bf16"},
    "a worker": {"loading": {"workers": 1}}, "seldom": {"save_steps": 3, "save_total_limit": 1},
    "best": {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True},
    "text": {"data": {"source": "text.txt", "eval_fraction": 0.2}, "sample_prompt": "some"}, "jax": JAX,
}  # fmt: skip


def write_text(folder: Path) -> None:
    """The text that a run of the way `text` learns."""
    (folder / "text.txt").write_text("".join(f"some text, line {i} of it\n" for i in range(200)))


def in_child(work: Callable[[], object], said: Path) -> int:
    """The exit code of a process that does some work; 0 where it is done, and negative where a signal ended it."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def trained(values: dict[str, Any]) -> None:
    """Train in this process, which is a child. What JAX compiles is kept for the next one."""
    if values.get("backend") == "jax":
        import jax

        jax.config.update("jax_compilation_cache_dir", str(Path("../compiled").resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    train(values)


def difference(whole: Path, run: Path) -> str | None:
    """Differences of two finished runs."""
    if not same_weights(whole, run):
        return "other weights than those of the run that nothing befell"
    same = logged_losses(whole) == logged_losses(run)
    return None if same else "other losses than those of the run that nothing befell"


PHASES = ("preparation", "step", "evaluation", "saving", "export")
"""Works of a run, one after the other: its data and build, the loop's three works, and all that follows the loop."""


@dataclass(frozen=True)
class Moment:
    """When a run is killed: `seconds` after it began, or began a `phase` for the `place`-th time; where there are no
    seconds, as it does something to a file for the `place`-th time."""

    place: int = 1
    seconds: float | None = None
    phase: str | None = None


class Phases:
    """Follows the phase of this process's run, as the first byte of `now`, which another process shares."""

    def __init__(self, now: mmap.mmap, entered: Callable[[str], object]) -> None:
        self.now, self.entered = now, entered
        self._note("run", "step", "export")
        self._note("evaluate", "evaluation", None)
        self._note("save", "saving", None)

    def _note(self, name: str, phase: str, behind: str | None) -> None:
        method = getattr(TrainingLoop, name)

        def noted(*arguments: Any) -> Any:
            before = PHASES[self.now[0]]
            self._enter(phase)
            try:
                return method(*arguments)
            finally:
                self._enter(behind or before)

        setattr(TrainingLoop, name, noted)

    def _enter(self, phase: str) -> None:
        self.now[0] = PHASES.index(phase)
        self.entered(phase)


def killed_at(values: dict[str, Any], moment: Moment, said: Path) -> str | None:
    """Train until a moment; the phase in which that killed it, None where it ended first.

    The process is ended by a signal that nothing catches, between two instructions of whatever it does then.
    """
    now, entries = mmap.mmap(-1, 1), Counter[str]()

    def entered(phase: str) -> None:
        entries[phase] += 1
        if phase == moment.phase and entries[phase] == moment.place:
            signal.setitimer(signal.ITIMER_REAL, moment.seconds or 0.0)

    def work() -> None:
        Phases(now, entered)
        if moment.seconds is None:
            sys.addaudithook(Countdown(moment.place))
        elif moment.phase is None:
            signal.setitimer(signal.ITIMER_REAL, moment.seconds)
        trained(values)

    code = in_child(work, said)
    if code == 1:
        raise AssertionError(said.read_text())
    return PHASES[now[0]] if code < 0 else None


class Countdown:
    """Kills this process as it opens, renames or removes a file, or the like, for the `left`-th time."""

    EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir",
                        "os.truncate", "shutil.rmtree", "shutil.copyfile", "os.chmod", "os.utime"})

    def __init__(self, left: int) -> None:
        self.left, self.here = left, str(Path.cwd())

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self.EVENTS or not arguments or not isinstance(arguments[0], str | bytes | Path):
            return
        path = str(Path.cwd() / os.fsdecode(arguments[0]))
        if path.startswith(self.here):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
