"""Runs on a machine that has too little of something else than memory: files that may not grow, few that may be open, a
full disk, no shared memory. They end with one message, or as if nothing had been, and go on where there is enough."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import yaml

from fuzzing.harness import Kind, Said, fault, run_command
from fuzzing.kills import undisturbed, warm
from fuzzing.runs import RUN, WAYS, difference, in_child, trained, write_text

NAMES = ("plain", "text", "a worker", "adapter", "best")
LIMITS = {"a file's size": (resource.RLIMIT_FSIZE, 0, 400_000), "open files": (resource.RLIMIT_NOFILE, 40, 160)}
"""Limits, and from how little to how much."""
MOUNTS = {"the disk": ("run", 20, 2000), "shared memory": ("/dev/shm", 4, 64)}
"""Folders that hold so few kilobytes, from and to."""


def attempt(seed: int, folder: Path) -> str | None:
    """A way of training, within a limit drawn from a seed, and then without it."""
    warm()
    draw = random.Random(seed)
    name = draw.choice(NAMES)
    undisturbed(name, folder.parent)
    os.chdir(folder)
    write_text(folder)
    values = {**RUN, **WAYS[name]}
    Path("mine.yaml").write_text(yaml.safe_dump(values))
    what = draw.choice([*LIMITS, *LIMITS, *MOUNTS])
    place, least, most = (LIMITS | MOUNTS)[what]
    amount = int(least * (most / max(least, 1)) ** draw.random()) if least else draw.randrange(most)
    said = limited(int(place), amount) if what in LIMITS else mounted(str(place), amount)
    if said is None:
        return None
    if wrong := fault(said):
        return f"{what} of {amount}, in {name}: {wrong}"
    if what == "the disk":  # which is gone with the process
        return None
    if in_child(lambda: trained(values), folder / "said"):
        return f"{what} of {amount}, in {name}: it cannot go on: {(folder / 'said').read_text()}"
    wrong = difference(folder.parent / name / "run", folder / "run")
    return wrong and f"{what} of {amount}, in {name}: {wrong}"


def limited(what: int, amount: int) -> Said:
    """Output of `tightfit train` under a limit of this process."""
    def work() -> None:
        soft, hard = resource.getrlimit(what)
        resource.setrlimit(what, (amount, hard))
        said = run_command("train", "mine.yaml")
        resource.setrlimit(what, (soft, hard))
        Path("said.json").write_text(json.dumps(asdict(said)))

    code = in_child(work, Path("output"))
    found = json.loads(Path("said.json").read_text()) if code == 0 else None
    return Said(**found) if found else Said(code, "", Path("output").read_text(errors="replace"))


def mounted(place: str, kilobytes: int) -> Said | None:
    """Output from cold where a folder holds so little; None where nobody may mount anything."""
    Path("run").mkdir()
    mount = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={kilobytes}k tmpfs {place} && exec "$@"', "-"]
    if os.geteuid() or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        return None
    done = subprocess.run([*mount, sys.executable, "-m", "tightfit", "train", "mine.yaml"], capture_output=True,
                          text=True, check=False, errors="replace")
    return Said(done.returncode, done.stdout, done.stderr)


KIND = Kind(attempt, quick=1, chunk=3)
