"""Inputs that no one would write, by the thousand: no traceback, no hang, no silent nonsense, and no run that is killed
ends with other weights.

    python benchmarks/fuzz.py [KIND...] [--seconds 60 | --seeds 1000 | --quick] [--record results/fuzz.json]
    python benchmarks/fuzz.py --only KIND:SEED

With a record it goes on behind the last seed there, and tries first what failed then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from fuzzing.harness import Kind, run_seeds

KINDS = ("recipes", "data", "models", "checkpoints", "kills", "limits")
KEPT = 20
"""Seeds after which a record is written anew."""
SAID = 600
"""Characters of a failure that are recorded."""


def kind_of(name: str) -> Kind:
    """The kind of that name, with what its processes share imported."""
    kind: Kind = importlib.import_module(f"fuzzing.{name}").KIND
    return kind


def ends(text: str, most: int = 3000) -> str:
    """A text's beginning and end."""
    text = text.strip()
    return text if len(text) <= most else f"{text[: most // 3]} ... {text[-most * 2 // 3 :]}"


def run(
    name: str, seeds: Iterable[int], deadline: float | None, keep: Callable[[int, dict[int, str]], None] | None = None
) -> tuple[int, dict[int, str]]:
    """How many seeds were tried, and those that failed; `keep` is told now and then."""
    tried, failed, began = 0, dict[int, str](), time.monotonic()
    for seed, wrong in run_seeds(kind_of(name), seeds, deadline):
        tried += 1
        if wrong is not None:
            failed[seed] = wrong
            again = f"python benchmarks/fuzz.py --only {name}:{seed}"
            print(f"{name}:{seed} failed: {ends(wrong)}\n  again: {again}", flush=True)
        if keep is not None and tried % KEPT == 0:
            keep(tried, failed)
    print(f"{name}: {tried} seeds in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    return tried, failed


def run_recorded(name: str, seeds: range, deadline: float | None, path: Path) -> bool:
    """Go on behind the seeds of the record, after those that failed; whether nothing fails."""
    kinds = json.loads(path.read_text())["kinds"] if path.exists() else {}
    found = kinds.setdefault(name, {"seeds": seeds.start, "mended": [], "failing": {}})
    before = {int(seed): why for seed, why in found["failing"].items()}
    _, failing = run(name, sorted(before), None) if before else (0, {})
    found["mended"] += [why for seed, why in before.items() if seed not in failing]
    first, counted = found["seeds"], Counter[str](found.get("counted", {}))
    from record import environment  # whose torch reads how many threads there are to be

    def keep(tried: int, failed: dict[int, str]) -> None:
        found["seeds"] = first + tried
        found["failing"] = {str(seed): ends(why, SAID) for seed, why in (failing | failed).items()}
        if befell := counted + kind_of(name).counted:
            found["counted"] = dict(sorted(befell.items()))
        path.write_text(json.dumps({"environment": environment(), "kinds": kinds}, indent=1) + "\n")

    keep(*run(name, range(first, seeds.stop), deadline, keep))
    return not found["failing"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--seconds", type=float, help="for all kinds together; 60 where nothing else says how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one, where there is no record")
    parser.add_argument("--seeds", type=int, help="up to this one of each kind")
    parser.add_argument("--quick", action="store_true", help="the same few seeds of each kind, about a minute")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", metavar="KIND:SEED")
    given = parser.parse_args()
    names = given.kinds or list(KINDS)
    if unknown := set(names) - set(KINDS):
        parser.error(f"no such kind: {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums have one order, and no thread is lost in a fork
    sys.path.append(str(Path(__file__).parents[1]))  # where the tests' tiny models and runs are
    if given.only:
        name, _, seed = given.only.partition(":")
        sys.exit(1 if run(name, [int(seed)], None)[1] else 0)
    good = True
    share = given.seconds or (None if given.quick or given.seeds else 60.0)
    for name in names:
        kind = kind_of(name)
        most = given.seed + kind.quick if given.quick else given.seeds or kind.seeds or sys.maxsize
        deadline = None if share is None else time.monotonic() + share / len(names)
        seeds = range(given.seed, min(most, kind.seeds or most))
        good &= run_recorded(name, seeds, deadline, given.record) if given.record else not run(name, seeds, deadline)[1]
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
