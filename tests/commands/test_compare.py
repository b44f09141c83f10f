"""`tightfit compare`: two recipes' predicted steps side by side."""

from __future__ import annotations

import json
import re

import pytest

FIELDS = """\
model: gpt2
model_overrides: {n_layer: 2, n_head: 2, n_embd: 16, n_positions: 32, attn_pdrop: 0.0}
vocab_size: 64
seq_len: 16
batch_size: 4
micro_batch_size: 2
precision: fp32
loss: plain
optimizer: adamw
attention: sdpa
compile: "off"
offload: none
"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "90")
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    paths[0].write_text(FIELDS + "checkpointing: none\n")
    paths[1].write_text(FIELDS.replace("adamw", "sgd") + "checkpointing: every-block\n")
    return list(map(str, paths))


def test_two_recipes_are_compared_by_category(recipes, run):
    status, out, _ = run("compare", *recipes, "--gpu", "l4")
    assert status == 0
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[0].split() == [*recipes[:1], "and", recipes[1], "on", "L4"]
    assert lines[1].startswith("changed")  # first what was changed
    changed = {line.split()[0]: line.split()[1:] for line in lines[3:5]}
    assert changed == {"checkpointing": ["none", "every-block"], "optimizer": ["adamw", "sgd"]}
    assert "waiting for the host" in out  # of so small a model
    for word in ("predicted", "tokens/s", "peak allocated", "peak reserved", "with CUDA context",
                 "memory at the peak", "activations", "optimizer states", "seconds of ops", "seconds of a step",
                 "backward"):
        assert word in out


def test_fields_alone_change_the_first_recipe(recipes, run):
    status, out, _ = run("compare", recipes[0], "seq_len=32", "batch_size=8", "--gpu", "l4", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["changes"] == {"seq_len": ["16", "32"], "batch_size": ["4", "8"]}
    first, second = found["memory at the peak"]["weights"]
    assert first == second > 0
    first, second = found["memory at the peak"]["all"]
    assert second > first
    assert found["peak"]["peak allocated"] == [first, second]
    assert {"forward", "backward", "optimizer"} <= found["seconds of a step"].keys()


def test_what_auto_became_is_marked_where_the_two_differ(recipes, run):
    words = ("compare", recipes[0], "checkpointing=every-block", "optimizer=auto", "loading.workers=1", "--gpu", "l4")
    status, out, _ = run(*words)
    assert status == 0
    changed = [line.split() for line in out.partition("predicted")[0].splitlines()]
    assert ["checkpointing", "none", "every-block"] in changed
    assert ["loading.workers", "2", "(auto)", "1"] in changed
    assert not any(line[:1] == ["optimizer"] for line in changed)  # where it became the same


def test_what_does_not_fit_is_said(recipes, run):
    wide = "model_overrides={n_layer: 2, n_head: 2, n_embd: 16384}"
    _, out, _ = run("compare", recipes[0], wide, "--gpu-memory", "8GB")
    row = next(line for line in out.splitlines() if line.startswith("free at the peak"))
    assert re.fullmatch(r"free at the peak +[\d.]+ GiB +-[\d.]+ GiB +-[\d.]+ GiB *", row)


@pytest.mark.parametrize(("words", "says"), [
    (["a.yaml"], "another one, or fields to change"), (["a.yaml", "a.yaml"], "another one, or fields to change"),
    (["seq_len=16"], "RECIPE is missing before seq_len=16"),
])
def test_one_recipe_alone_is_refused(recipes, run, words, says):
    status, out, err = run("compare", *words, *["batch_size=8"] * ("=" in words[0]), "--gpu", "l4")
    assert (status, out) == (2, "")
    assert says in err


def test_two_models_are_compared(recipes, run):
    other = ("model=bert-base", "task=masked-lm", "model_overrides={num_hidden_layers: 1}")
    _, out, _ = run("compare", recipes[0], *other, "--gpu", "l4", "--json")
    found = json.loads(out)
    assert found["changes"]["model"] == ["gpt2", "bert-base"]
    assert found["changes"]["task"] == ["causal-lm", "masked-lm"]
    first, second = found["memory at the peak"]["weights"]
    assert second > 100 * first


@pytest.mark.parametrize(("words", "says"), [
    (["precision=fp8"], "a.yaml precision=fp8: precision: fp8 products need compute capability 8.9"),
    (["precision=fp7"], "a.yaml precision=fp7: precision: 'fp7' is not known"),
    (["nothing.yaml"], "nothing.yaml: no such recipe file"),
])
def test_the_recipe_that_cannot_be_planned_is_named(recipes, run, words, says):
    status, out, err = run("compare", recipes[0], *words, "--gpu", "rtx-3090")
    assert (status, out) == (2, "")
    assert says in err
    assert ("predicting a step" in err) == (words == ["precision=fp8"])  # both are read before either is predicted


def test_a_recipe_that_is_missing_is_named_before_a_gpu_is_asked_for(recipes, run):
    status, _, err = run("compare", recipes[0], "nothing.yaml")
    assert (status, err.startswith("tightfit: nothing.yaml: no such recipe file")) == (2, True)
