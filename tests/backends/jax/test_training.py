"""Whole runs: trained, stopped and gone on to the very weights, without PyTorch, and on two devices as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tightfit
from tests.backends.jax.cases import TINY, fast_options
from tests.training.runs import Said, StopAt, logged_losses, same_weights
from tightfit.backends.jax.assembly import compiler_options
from tightfit.errors import CheckpointError, RecipeError, Refused
from tightfit.profiling import profile as profiles
from tightfit.training.trainer import Trainer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path, shared_cache):
    """A run with dropout, several epochs, ragged global batches, warm-up and clipping: everything that could drift."""
    return {**TINY, "model_overrides": {**TINY["model_overrides"], "num_layers": 2, "dropout_rate": 0.1},
            "data": {"source": "dummy", "samples": 10}, "max_steps": 8, "save_steps": 5, "warmup_steps": 2,
            "lr_scheduler_type": "cosine", "logging_steps": 1, "output_dir": str(tmp_path / "run"),
            "cache_dir": str(shared_cache), "loading": {"workers": 1}}


def test_a_stopped_run_goes_on_to_the_same_weights(run, tmp_path):
    whole = Trainer(recipe={**run, "output_dir": str(tmp_path / "whole"), "save_steps": None}).train()
    assert whole.eval_loss is not None
    assert whole.peak_memory > 0
    assert whole.compile_seconds > 0
    stopped = Trainer(recipe=run, listener=StopAt(5)).train()
    assert (stopped.stopped_by, stopped.steps < 8) == ("SIGTERM", True)
    assert Trainer(recipe=run).train().first_step == stopped.steps
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    assert logged_losses(tmp_path / "whole") == logged_losses(tmp_path / "run")


def test_the_finished_model_is_the_best_ones(run, tmp_path):
    run |= {"eval_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "save_steps": None}
    summary = Trainer(recipe={**run, "load_best_model_at_end": True}).train()
    assert summary.best_step is not None
    assert 0 < summary.best_step < 8
    best = {**run, "max_steps": summary.best_step, "output_dir": str(tmp_path / "best")}
    assert Trainer(recipe=best).train().eval_accuracy == summary.eval_accuracy
    assert same_weights(tmp_path / "run", tmp_path / "best")


def test_a_checkpoint_of_pytorch_is_no_run_to_go_on_from(run):
    Trainer(recipe={**run, "max_steps": 1, "backend": "pytorch"}).train()
    with pytest.raises(CheckpointError, match="backend"):
        Trainer(recipe={**run, "max_steps": 2}).train()


def test_a_step_of_a_run_is_profiled_on_the_way(run, tmp_path):
    said = Said()
    summary = Trainer(recipe={**run, "profile_step": 4, "max_steps": 5, "save_steps": None}, listener=said).train()
    assert any(text.startswith("not predicted: backend: jax is planned") and "backend=pytorch" in text
               for text in said.texts)
    assert summary.steps == 5
    found = profiles.load(tmp_path / "run")
    assert "step 4 of a training run" in found.notes
    assert found.peak_bytes == found.measured.peak()[1]
    assert (tmp_path / "run/profile/plugins/profile/step/local.xplane.pb").stat().st_size
    assert (tmp_path / "run/trace.json.gz").stat().st_size


def test_what_is_not_there_says_so(run):
    with pytest.raises(Refused, match="backend: jax is planned for GPUs alone"):
        tightfit.plan(None, run, gpu="cpu")


@pytest.mark.parametrize(("changes", "said"), [
    ({"loss": "liger"}, "loss: liger is not in backend: jax, because Liger's kernels are PyTorch's; write loss=plain"),
    ({"attention": {"name": "sdpa", "kernel": "flash"}},
     "attention.kernel: flash is PyTorch's; write attention.kernel=cudnn, or auto"),
])  # fmt: skip
def test_advice_is_what_the_backend_has(run, changes, said):
    with pytest.raises(Refused) as raised:
        Trainer(recipe={**run, **changes}).train()
    assert str(raised.value) == said


ALONE = """
import sys
sys.argv = ["tightfit", "train", sys.argv[1]]
from tightfit.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "jax" in sys.modules
assert "torch" not in sys.modules, "torch was imported"
"""


def python(script: str, *words: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment)


def test_the_command_line_trains_without_pytorch(run, tmp_path):
    """From text, with a tokenizer, a sample, and a flag of XLA's."""
    (tmp_path / "text.txt").write_text("The same few words over and over, and over again.\n" * 300)
    changes = {"data": str(tmp_path / "text.txt"), "vocab_size": 300, "max_steps": 2, "sample_prompt": "The same",
               "backend": {"name": "jax", "xla_flags": [f"--{name}={value}" for name, value in fast_options().items()]},
               "attention": "auto"}
    (tmp_path / "mine.yaml").write_text(json.dumps({**run, **changes}))
    done = python(ALONE, str(tmp_path / "mine.yaml"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["sample"].startswith("The same")


TWO = """
import jax, numpy as np
from tests.backends.jax.cases import build, fast_options
from tightfit.backends.jax import assembly
from tightfit.backends.jax.loading import stack_micro_batches
from tightfit.backends.jax.step import Step
from tightfit.tasks import MicroBatch, global_batch_of
assembly.compiler_options = lambda flags, devices: fast_options()
assert len(jax.devices()) == 2
ids = np.random.default_rng(0).integers(0, 64, (3, 8))
global_batch = global_batch_of((MicroBatch(inputs={"input_ids": ids}, labels=np.roll(ids, -1, 1)),))
found = []
for parallel in ("none", "dp"):
    step = Step(build(batch_size=3, micro_batch_size=3, parallel=parallel, optimizer="sgd"))
    assert len(step.build.devices) == (2 if parallel == "dp" else 1)
    losses = [step(stack_micro_batches(global_batch, 1, step.build.rows), 0.5).read() for _ in range(3)]
    labels = stack_micro_batches(global_batch, 1, step.build.rows).arrays["labels"]
    placed = jax.device_put(labels, step.build.batch_sharding)
    assert len({shard.device for shard in placed.addressable_shards}) == len(step.build.devices)
    assert parallel == "none" or placed.addressable_shards[0].data.shape[1] == 2
    found.append((losses, jax.device_get(step.state["params"])))
(one, alone), (two, shared) = found
for a, b in zip(one, two, strict=True):
    assert abs(a.loss.mean - b.loss.mean) < 1e-5 and abs(a.grad_norm - b.grad_norm) < 1e-4, (a, b)
for name in alone:
    np.testing.assert_allclose(alone[name], shared[name], atol=2e-6, err_msg=name)
"""


@pytest.mark.cold
def test_two_devices_learn_what_one_learns():
    done = python(TWO, flags="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stderr


def test_an_unknown_flag_of_xla_is_named_and_ends_nothing():
    import jax

    devices = jax.devices("cpu")
    with pytest.raises(RecipeError, match=r"xla_flags: xla_gpu_nonsense cannot be used .*No such compile option"):
        compiler_options(["--xla_backend_optimization_level=1", "--xla_gpu_nonsense=true"], devices)
    with pytest.raises(RecipeError, match="should read --xla_NAME=VALUE"):
        compiler_options(["fast=true"], devices)
    assert compiler_options([], devices) == {}
    known = compiler_options(["--xla_backend_optimization_level=1", "--xla_cpu_enable_fast_math=false"], devices)
    assert known == {"xla_backend_optimization_level": "1", "xla_cpu_enable_fast_math": "False"}
