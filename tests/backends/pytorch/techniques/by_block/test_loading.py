"""A model whose blocks wait in host memory is loaded, saved and resumed block by block: the host holds it once."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.backends.pytorch.techniques.by_block.streaming_cases import BY_BLOCK, HOST
from tests.backends.pytorch.techniques.by_block.test_predicted import A100, recipe_of
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.by_block.parts import Parts
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.trace import Place

BLOCKS = 3
SLACK = 48 << 20
"""What the process takes beside tensors, and small tensors' freed memory that it has not given back."""

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
              pytest.mark.usefixtures("few_objects")]


LIBC = ctypes.CDLL(None)
MALLOC = {"MALLOC_TRIM_THRESHOLD_": (-1, 128 << 10), "MALLOC_TOP_PAD_": (-2, 0),
          "MALLOC_MMAP_THRESHOLD_": (-3, 128 << 10)}
"""glibc's names of what `mallopt` sets, with its parameter and usual value."""


@pytest.fixture(autouse=True)
def freed_memory_goes_back() -> Iterator[None]:
    """malloc gives large freed memory back, as it usually does; the suite lets it keep that, which is faster."""
    set_to = getattr(LIBC, "mallopt", lambda parameter, value: None)
    for parameter, usual in MALLOC.values():
        set_to(parameter, usual)
    yield
    for name, (parameter, usual) in MALLOC.items():
        set_to(parameter, int(os.environ.get(name, usual)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights of a model in bf16, 163 MiB: nearly all of them too large for malloc to keep what is freed."""
    path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=9216, num_hidden_layers=BLOCKS,
                                      num_attention_heads=2, num_key_value_heads=2, head_dim=32, vocab_size=64,
                                      tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, number / 256)
    model.save_pretrained(path)
    return path


def anonymous() -> int:
    """Bytes of this process's memory that no file stands behind."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def peak() -> Iterator[SimpleNamespace]:
    """The most memory taken inside, over what was taken before, in `bytes`."""
    gc.collect()
    getattr(LIBC, "malloc_trim", int)(0)
    before, over, seen = anonymous(), threading.Event(), [0]
    taken = SimpleNamespace(bytes=0)

    def watch() -> None:
        while not over.wait(0.001):
            seen.append(anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield taken
    finally:
        over.set()
        watching.join()
        taken.bytes = max(*seen, anonymous()) - before


def recipe_for(folder: Path, **fields: object) -> Recipe:
    return Recipe.from_dict({
        "model": str(folder), "data": {"source": "dummy", "eval_fraction": 0}, "batch_size": 2, "micro_batch_size": 1,
        "seq_len": 16, "attention": "eager", "compile": "off", "loss": "plain", "checkpointing": "every-block",
        "precision": "fp32", "optimizer": "sgd", **HOST, **fields,
    })


def streamed(folder: Path, **fields: object) -> Step:
    recipe = resolve(recipe_for(folder, **fields), A100)
    return Step(apply_techniques(bare_build(recipe, A100, torch.device("cpu"))), inspect=False)


def block_bytes(step: Step) -> int:
    return sum(p.numel() * p.element_size() for p in step.build.stacks[0][0].parameters())


def test_the_host_holds_the_model_once_and_a_block_twice(folder, tmp_path):
    for precision in "bf16-pure", "fp32":  # the files' own format, and one to convert to
        with peak() as loading:
            step = streamed(folder, precision=precision)
        block = block_bytes(step)
        assert BLOCKS * block - SLACK < loading.bytes < (BLOCKS + 1) * block + SLACK
        if precision == "bf16-pure":
            del step
    with peak() as making:
        step.update.make_states()
    assert making.bytes < (BLOCKS + 2 + 2 + 3) * block + SLACK  # states, places on the device, a block's own work
    with peak() as writing:
        meta = step.save(tmp_path)
        step.export(tmp_path / "model", None)
    assert writing.bytes < SLACK
    wanted = {name: p.detach().clone() for name, p in step.build.model.named_parameters()}

    del step
    step = streamed(folder)
    for parameter in step.build.model.parameters():
        nn.init.zeros_(parameter)
    with peak() as resuming:
        step.load(tmp_path, meta)
    assert resuming.bytes < making.bytes + SLACK
    assert all(torch.equal(p, wanted[name]) for name, p in step.build.model.named_parameters())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(p, wanted[name]) for name, p in again.named_parameters())


@pytest.mark.parametrize("share", [1, 0.34])
def test_the_device_gets_what_does_not_wait_and_no_more(folder, share, monkeypatch):
    device, move, moved = torch.device("cuda"), torch.Tensor.to, []

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args[:1] != (device,):
            return move(tensor, *args, **kwargs)
        moved.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    recipe = recipe_for(folder, **{**HOST, "offload": {"name": "host", "weights": share, "embeddings": share == 1}})
    build = apply_techniques(bare_build(resolve(recipe, A100), A100, device))
    tensors = [*build.model.parameters(), *build.model.buffers()]
    parts = Parts(build.model, build.blocks)
    waiting = [p.numel() for number in parts.first(share, embeddings=share == 1) for p in parts.parameters[number]]

    assert sum(moved) == sum(tensor.numel() for tensor in tensors) - sum(waiting)


def test_a_plan_counts_the_block_that_loading_holds_twice():
    fields = {**BY_BLOCK, "offload": {"name": "host", "gradients": 0, "optimizer": 0}}
    trace = predict(recipe_of(3, **fields), A100)
    before, _ = trace.peak(stop=trace.span("step 1").start, place=Place.HOST)
    homes = [a.bytes for a in trace.lying_in(Place.HOST) if a.pinned]

    assert len(homes) == 3
    most, taken = trace.peak(place=Place.HOST)
    assert most == before
    assert taken == pytest.approx(sum(homes) + homes[0], rel=0.01)
