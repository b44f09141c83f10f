"""`tightfit train` with several processes, from cold: they are started, and ended, by torch's own launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from tests.deepspeed import needs_deepspeed
from tests.training.processes import recorded
from tests.training.runs import logged_losses
from tightfit.training.trainer import Trainer

pytestmark = pytest.mark.cold
ENDS = {"killed": (1, "tightfit: parallel: process 1 of 2 was ended by SIGKILL"),
        "stopped": (128 + signal.SIGTERM, "stopped by SIGTERM at step")}
"""The exit status of a run that is ended so, and what it says last."""


def start(
    run: dict[str, object], folder: Path, *words: str, launcher: Sequence[str] = (), parallel: str = "ddp"
) -> subprocess.Popen[str]:
    """launcher: a module that starts the command, and its words."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump({**run, "output_dir": str(folder), "parallel": parallel}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    through = ("-m", *launcher) if launcher else ()
    return subprocess.Popen([sys.executable, *through, "-m", "tightfit", "train", str(recipe), *words], env=environment,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("how", ENDS)
def test_a_run_that_is_ended_goes_on(tiny, tmp_path, how):
    folder, (status, said) = tmp_path / "run", ENDS[how]
    process = start({**tiny, "save_steps": 2, "max_steps": 1_000_000}, folder, "parallel.processes=2")
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(logged_losses(folder)) < 5:
        time.sleep(0.05)
        assert time.monotonic() < deadline
        assert process.poll() is None
    if how == "killed":
        max(psutil.Process(process.pid).children(), key=lambda child: child.pid).kill()
    else:
        process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert sum(said in line for line in output.splitlines()) == 1
    assert "Traceback" not in output
    saved = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    steps = int(saved.removeprefix("step-")) + 1
    process = start({**tiny, "max_steps": steps}, folder, "parallel.processes=2")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count(f"resuming from step {steps - 1} of {steps}") == 1
    assert [*logged_losses(folder)] == [*range(1, steps + 1)]


NARROW = """\
import os
import torch
from torch import nn


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.calls = nn.Embedding(128, 8), nn.Linear(8, 128), 0

    def forward(self, input_ids):
        self.calls += 1
        if os.environ.get("RANK") == "1" and len(input_ids) > 1 and self.calls > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes")
        return self.head(self.embedding(input_ids))
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_of_which_one_runs_out_of_memory_go_on_together(tiny, tmp_path, monkeypatch, parallel):
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    run = {**tiny, "model": "narrow:Narrow", "model_overrides": {}, "save_steps": 2, "batch_size": 16,
           "max_steps": 6}  # fmt: skip
    outputs = {}
    for kind, words in (("none", ()), (parallel, ("parallel.processes=2",))):
        process = start(run, tmp_path / kind, *words, parallel=kind)
        outputs[kind], _ = process.communicate(timeout=120)
        assert process.returncode == 0, outputs[kind]
    assert outputs[parallel].count("Tried to allocate 9 bytes\n") == 2
    said = [line for line in outputs[parallel].splitlines() if line.startswith("Going on from the newest checkpoint")]
    assert ["micro_batch_size=2" in said[0], "micro_batch_size=1" in said[1]] == [True] * len(said)
    assert "resuming from step 2 of 6" in outputs[parallel]
    assert logged_losses(tmp_path / parallel) == pytest.approx(logged_losses(tmp_path / "none"), abs=2e-6)


def test_what_cannot_be_is_said_once(tiny, tmp_path):
    for words, said in (((), "parallel.processes: on a processor nothing says how many"),
                        (("parallel.processes=2", "batch_size=64"), "fewer than one global batch of 64")):
        process = start(tiny, tmp_path / "run", *words)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert output.startswith("tightfit: ")
        assert output.count("\n") == output.count(said) == 1


def test_a_wrong_field_is_said_once_by_what_torchrun_started(tiny, tmp_path):
    process = start(tiny, tmp_path / "run", "nonsense=3", launcher=TORCHRUN, parallel="fsdp")
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert output.count("tightfit: nonsense: not a field") == 1


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ACCELERATE = ("accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no")  # fmt: skip
LAUNCHED: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "torchrun": (TORCHRUN, ()), "accelerate": ((*ACCELERATE, "--multi_gpu", "--main_process_port", "0"), ()),
    # It starts one process alone on a processor, which starts its own.
    "accelerate on a processor": ((*ACCELERATE, "--cpu"), ("parallel.processes=2",)),
    "tightfit": ((), ("parallel.processes=2",)),
}  # fmt: skip
"""A launcher of two processes, and what the recipe says besides."""


@pytest.mark.parametrize(("name", "parallel"), [
    *((name, "ddp") for name in LAUNCHED), pytest.param("torchrun", "zero", marks=needs_deepspeed),
    pytest.param("tightfit", "zero", marks=needs_deepspeed),
])  # fmt: skip
def test_what_a_launcher_started_trains_together_and_says_all_once(tiny, tmp_path, name, parallel):
    alone, together = tmp_path / "alone", tmp_path / "together"
    Trainer(recipe={**tiny, "output_dir": str(alone)}).train()
    launcher, words = LAUNCHED[name]
    process = start(tiny, together, *words, launcher=launcher, parallel=parallel)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert output.count("run folder:") == output.count("step 4/4") == 1
    assert [*logged_losses(together)] == [1, 2, 3, 4]
    assert recorded(together, "loss") == pytest.approx(recorded(alone, "loss"), abs=2e-6)
