"""Ladders recorded: the named ones climbed on this machine, their rows in results/ladder-NAME-DEVICE.jsonl.

Run: python benchmarks/record_ladders.py [NAME ...] [--peer PEER ...] [--scale SCALE] [--minutes 7.5]
What has a row is not run again: a ladder that takes longer than the minutes is gone on with by the next call. A ladder
in JAX is left out at full scale where JAX sees no GPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

import record
from tightfit.ladder.catalogue import LADDERS, find_ladder
from tightfit.ladder.climbing import climb
from tightfit.ladder.climbs import Asked, Climb
from tightfit.ladder.comparisons import ran
from tightfit.ladder.lines import lines
from tightfit.ladder.picture import save_picture
from tightfit.ladder.rows import OURS, RESULTS
from tightfit.ladder.rungs import SCALES, STEPS, Scale
from tightfit.ladder.table import show

RUNG_SECONDS = 300.0
SEEN = "import jax; raise SystemExit(jax.devices()[0].platform != 'gpu')"
"""Asked in a process of its own: JAX takes most of a GPU's memory as it starts."""


def recorded(name: str, scale: Scale, peers: list[str], until: float, gpu: str | None) -> Climb:
    """A ladder climbed as far as the time goes; its rows and its picture in results/."""
    kept = record.RESULTS / f"ladder-{name}-{device_slug()}.jsonl"
    folder = Path("ladders") / kept.stem
    folder.mkdir(parents=True, exist_ok=True)
    if kept.exists():
        shutil.copy(kept, folder / RESULTS)
    ladder = find_ladder(name)
    warm_up, steps = STEPS[scale]
    asked = Asked(
        ladder=ladder, scale=scale, folder=folder, runners=(OURS, *peers), warm_up=warm_up, steps=steps,
        limit=RUNG_SECONDS, gpu=gpu or (None if scale == "full" else ladder.gpu), until=until,
    )  # fmt: skip
    try:
        done = climb(asked, lambda text: print(text, flush=True))
    finally:
        if (folder / RESULTS).exists():
            shutil.copy(folder / RESULTS, kept)
    save_picture(kept.with_suffix(".png"), done)
    return done


def device_slug() -> str:
    """`h200` for `NVIDIA H200`, `cpu` without a GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return "-".join(word for word in name.lower().replace("/", " ").split() if word != "nvidia")


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
    if unknown := set(asked.names) - set(LADDERS):
        sys.exit(f"no such ladder: {', '.join(unknown)}; there are {', '.join(LADDERS)}")
    until, measured = time.monotonic() + 60 * asked.minutes, True
    for name in asked.names:
        if asked.scale == "full" and not find_ladder(name).backend.runs_torch and not jax_sees_gpu():
            print(f"{name}: left out, since JAX sees no GPU here; run: pip install 'tightfit[jax-cuda]'")
            continue
        done = recorded(name, asked.scale, asked.peer, until, asked.gpu)
        show(done, Console(width=200))
        measured &= bool(ran(lines(done)))
    sys.exit(0 if measured else 1)


if __name__ == "__main__":
    main()
