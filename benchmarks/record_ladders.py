"""Ladders recorded: the named ones run on this machine, their rows in results/ladder-NAME-DEVICE.jsonl,
which `python docs/pictures.py ladders` draws.

Run: python benchmarks/record_ladders.py [NAME ...] [--peer PEER ...] [--scale SCALE] [--minutes 7.5]
What has a row is not run again: a ladder that takes longer than the minutes is gone on with by the next call. A ladder
in JAX is left out at full scale where JAX sees no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

import record
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.rows import OURS, RESULTS, read
from tightfit.ladder.run import LadderRun, run_rungs, this_machine
from tightfit.ladder.rungs import SCALES, STEPS_OF_SCALE, Scale
from tightfit.ladder.table import show

RUNG_SECONDS = 300.0
SEEN = "import jax; raise SystemExit(jax.devices()[0].platform != 'gpu')"
"""Asked in a process of its own: JAX takes most of a GPU's memory as it starts."""


@contextlib.contextmanager
def minutes(count: float) -> Iterator[None]:
    """End the block after so many minutes, as Ctrl-C would."""
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * count)
    try:
        yield
    except KeyboardInterrupt:
        print("the time is over", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def results_path(name: str) -> Path:
    return record.RESULTS / f"ladder-{name}-{record.device_slug()}.jsonl"


def record_ladder(name: str, scale: Scale, peers: list[str], gpu: str | None) -> None:
    """Run a ladder, and keep its rows in results/, also where it is stopped."""
    kept = results_path(name)
    folder = record.RESULTS.parent / "ladders" / kept.stem
    folder.mkdir(parents=True, exist_ok=True)
    if kept.exists():
        shutil.copy(kept, folder / RESULTS)
    ladder = ladders()[name]
    warm_up, steps = STEPS_OF_SCALE[scale]
    run = LadderRun(
        ladder=ladder, scale=scale, folder=folder, machine=this_machine(ladder.recipe(ladder.rungs[0], scale)),
        log=lambda text: print(text, flush=True), runners=(OURS, *peers), warm_up=warm_up, steps=steps,
        limit=RUNG_SECONDS, gpu=gpu or (None if scale == "full" else ladder.gpu),
    )  # fmt: skip
    try:
        run_rungs(run)
    finally:
        if (folder / RESULTS).exists():
            shutil.copy(folder / RESULTS, kept)
        show(run, Console(width=200))


def jax_sees_gpu() -> bool:
    """Whether JAX would run on a GPU."""
    return subprocess.run([sys.executable, "-c", SEEN], capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["bert-large", "transformer-156m", "fp16-batch"])
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--scale", default="full" if torch.cuda.is_available() else "reduced", choices=SCALES)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--gpu", help="a card to predict the full size for")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(ladders()):
        sys.exit(f"no such ladder: {', '.join(unknown)}; there are {', '.join(ladders())}")
    compiled = {name for name in asked.names if not ladders()[name].backend.runs_torch}
    if compiled and asked.scale == "full" and not jax_sees_gpu():
        print(f"{', '.join(compiled)}: left out, since JAX sees no GPU here; run: pip install 'tightfit[jax-cuda]'")
    else:
        compiled = set()
    names = [name for name in asked.names if name not in compiled]
    with minutes(asked.minutes):
        for name in names:
            record_ladder(name, asked.scale, asked.peer, asked.gpu)
    figures = [any(row.status == "done" for row in read(results_path(name)).measured) for name in names]
    sys.exit(0 if all(figures) else 1)


if __name__ == "__main__":
    main()
