"""What Windows does not have, taken away: everything still imports, plans, trains and reports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tightfit

SOURCE = Path(tightfit.__file__).parent
BLOCKED = {"fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog", "posix"}
POSIX_ONLY = """
import builtins, multiprocessing, os, signal, sys, types

BLOCKED = sys.argv.pop()
real = builtins.__import__

def importing(name, globals=None, *rest, **named):
    if name.partition(".")[0] in BLOCKED.split() and (globals or {}).get("__name__", "").startswith("tightfit"):
        raise ImportError(f"there is no {name} on this system")
    return real(name, globals, *rest, **named)

import psutil, torch, transformers, torch.distributed.run
builtins.__import__ = importing
for module, names in ((signal, ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM")),
                      (os, ("killpg", "sched_getaffinity", "posix_fadvise", "fork"))):
    for name in names:
        delattr(module, name)
signal.SIGBREAK = signal.SIGUSR2
multiprocessing.set_start_method("spawn")
locked = []
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda *arguments: locked.append(arguments))

class Windows(psutil.Process):
    def memory_info(self):
        return types.SimpleNamespace(rss=1, vms=1, peak_wset=123456789)

psutil.Process = Windows
import tightfit
"""
"""Code that runs first in a process: what is blocked is blocked for imports of ours, for libraries have ways around."""


def ran(code: str, *words: str) -> str:
    command = [sys.executable, "-c", POSIX_ONLY + code, *words, " ".join(BLOCKED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_modules_of_posix_alone_are_imported_in_one_place():
    """Where an ImportError is expected."""
    for path in SOURCE.rglob("*.py"):
        found = {alias.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Import)
                 for alias in node.names}  # fmt: skip
        found |= {node.module for node in ast.walk(ast.parse(path.read_text("utf-8")))
                  if isinstance(node, ast.ImportFrom)}  # fmt: skip
        assert not found & BLOCKED or path.name == "system.py", path


@pytest.mark.cold
def test_a_model_is_planned_trained_and_resumed(tiny, tmp_path):
    values = {**tiny, "max_steps": 3, "save_steps": 1, "device": "cpu", "compile": "off", "checkpointing": "none",
              "optimizer": "adamw", "precision": "fp32", "attention": "sdpa", "loss": "plain", "offload": "none"}
    code = """
import json
from tightfit.system import SIGNALS, host_memory
values = json.loads(sys.argv[1])
plan = tightfit.plan(recipe={**values, "device": "auto"}, gpu="rtx-4090")
first = tightfit.Trainer(recipe={**values, "max_steps": 2}).train()
second = tightfit.Trainer(recipe={**values, "loading": {"workers": 1}}).train()
print(json.dumps([plan.chosen is not None, first.steps, second.first_step, second.steps, second.peak_memory,
                  len(locked), signal.SIGBREAK in SIGNALS, host_memory().total]))
"""
    found = json.loads(ran(code, json.dumps(values)).splitlines()[-1])
    assert found[:7] == [True, 2, 2, 3, 123456789, 2, True]
    assert found[7] > 2**30
    assert (Path(values["output_dir"]) / "summary.json").exists()
