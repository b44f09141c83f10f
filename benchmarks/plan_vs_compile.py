"""Memory of compiled forward and backward passes on the CPU: predicted on fake tensors against Inductor's real code.

Truth is torch.profiler's own allocation events. Each case compiles for real, in a process of its own, 10 to 60 s.
Run: python benchmarks/plan_vs_compile.py [CASE ...]
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import record
from cpu_truth import Allocations
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build, CompileBackend
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.compiled.regions import Regions, compiling_for
from tightfit.backends.pytorch.simulate.cpu_scratch import scratch
from tightfit.devices import Device
from tightfit.recipe import Recipe

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
ROWS, LENGTH, WIDTH, LAYERS = 4, 256, 128, 3
VOCABULARY = 512


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny model, and how it is compiled and recomputed."""

    model: str = "gpt2"
    compile: str = "per-block"
    dropout: float = 0.0
    precision: str = "fp32"
    attention: str = "sdpa"
    checkpointing: str | dict[str, Any] = "none"


TILES = {"name": "tiled-mlp", "tokens": 256}


def budget(share: float) -> dict[str, Any]:
    return {"name": "memory-budget", "budget": share}


CASES = {
    "gpt2": Case(),
    "gpt2, whole": Case(compile="whole"),
    "gpt2, dropout": Case(dropout=0.1),
    "gpt2, bf16": Case(precision="bf16"),
    "gpt2, eager attention": Case(attention="eager"),
    "gpt2, every block recomputed": Case(checkpointing="every-block"),
    "gpt2, every block recomputed, dropout": Case(checkpointing="every-block", dropout=0.1),
    "gpt2, whole, every block recomputed": Case(compile="whole", checkpointing="every-block"),
    "gpt2, segments": Case(checkpointing="segments"),
    "gpt2, budget 0.5": Case(checkpointing=budget(0.5)),
    "gpt2, budget 0": Case(checkpointing=budget(0)),
    "gpt2, whole, budget 0.3, dropout": Case(compile="whole", checkpointing=budget(0.3), dropout=0.1),
    "gpt2, tiles, dropout": Case(checkpointing=TILES, dropout=0.1),
    "llama": Case("llama"),
    "llama, whole, bf16": Case("llama", compile="whole", precision="bf16"),
    "llama, tiles, bf16": Case("llama", checkpointing=TILES, precision="bf16"),
    "bert, dropout": Case("bert", dropout=0.1),
    "bert, whole": Case("bert", compile="whole"),
}


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config: Any
    if case.model == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=LENGTH, bos_token_id=1,
            eos_token_id=2, resid_pdrop=case.dropout, embd_pdrop=case.dropout, attn_pdrop=0.0,
        )
    elif case.model == "llama":
        config = transformers.LlamaConfig(**shape, num_key_value_heads=2)
    else:
        config = transformers.BertConfig(**shape, hidden_dropout_prob=case.dropout, attention_probs_dropout_prob=0.0)
    auto = transformers.AutoModelForMaskedLM if case.model == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    return model


def prepare(case: Case, backend: CompileBackend | None = None) -> Build:
    """The model with its techniques applied. backend: what the compiler gets in place of Inductor."""
    recipe = Recipe.from_dict({
        "task": "masked-lm" if case.model == "bert" else "causal-lm", "attention": case.attention,
        "precision": case.precision, "checkpointing": case.checkpointing, "compile": case.compile,
        "optimizer": "adamw", "seq_len": LENGTH, "micro_batch_size": ROWS, "batch_size": ROWS, "device": "cpu",
    })
    return assemble(recipe, CPU, torch.device("cpu"), make_model(case),
                    lambda build: dataclasses.replace(build, compile_backend=backend))


def forward(build: Build) -> Tensor:
    """The loss of one micro-batch: nothing stays alive but what the backward pass needs."""
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
    return build.loss_sum(TensorBatch(inputs={"input_ids": ids}, labels=ids))


def measured(case: Case) -> dict[str, int]:
    """Peaks of the second step, in bytes above what stood before it."""
    build = prepare(case)
    with build.process_settings():
        forward(build).backward()
        build.model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        peak, saved = allocations(lambda: losses.append(forward(build)))
        again, _ = allocations(lambda: losses.pop().backward())
    return {"forward": peak, "saved": saved, "backward": saved + again}


def allocations(work: Callable[[], object]) -> tuple[int, int]:
    """The most bytes allocated at once during `work`, and those left after it."""
    with Allocations() as recorded:
        recorded.begin("work")
        work()
    return recorded.peaks()["work"], recorded.held()


def predicted(case: Case) -> dict[str, int]:
    tracker = Tracker(scratch=scratch)

    with FakeTensorMode(), compiling_for(FakeTensorMode), ExitStack() as settings, tracker:
        build = prepare(case, Regions(CPU, scratch).reporting_to(tracker))
        settings.enter_context(build.process_settings())
        forward(build).backward()
        build.model.zero_grad(set_to_none=True)
        with tracker.span("base"):
            pass
        with tracker.span("forward"):
            loss = forward(build)
        with tracker.span("saved"):
            pass
        with tracker.span("backward"):
            loss.backward()
    trace = tracker.trace("predicted")
    peaks = {name: trace.peak(trace.span(name).start, trace.span(name).stop)[1]
             for name in ("base", "forward", "saved", "backward")}
    base = peaks.pop("base")
    return {name: peak - base for name, peak in peaks.items()}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--measure":
        print(json.dumps(measured(CASES[sys.argv[2]])))
        return
    torch.set_num_threads(1)
    outcome = {}
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as cache:
            settings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--measure", name]
            run = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        truth, plan = json.loads(run.stdout.splitlines()[-1]), predicted(CASES[name])
        errors = {phase: plan[phase] / truth[phase] - 1 for phase in truth}
        outcome[name] = {"measured": truth, "predicted": plan, "error": errors}
        print(f"{name:40}", "  ".join(f"{phase} {error:+.3%}" for phase, error in errors.items()), flush=True)
    if len(sys.argv) == 1:
        worst = max(abs(error) for case in outcome.values() for error in case["error"].values())
        print(record.write("plan_vs_compile", {"cases": outcome, "worst": worst}))


if __name__ == "__main__":
    main()
