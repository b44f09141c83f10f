"""A mixture of experts trains: its loss falls, its experts come to be used alike, and the run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import logged
from tightfit import Trainer
from tightfit.training.summary import Summary

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 32, "intermediate_size": 64, "head_dim": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> tuple[Summary, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "notes.txt"
    text.write_text("".join(f"def add_{n}(a, b):\n    return a + b * {n}\n\n\n" for n in range(400)))
    summary = Trainer(recipe={
        "model": "moe-tiny", "model_overrides": SMALL, "data": str(text), "seq_len": 32, "batch_size": 8,
        "micro_batch_size": 4, "max_steps": 40, "logging_steps": 5, "learning_rate": 3e-3, "device": "cpu",
        "router_aux_loss_coef": 0.1, "output_dir": str(folder / "run"), "cache_dir": str(shared_cache),
        "vocab_size": 300,
    }).train()  # fmt: skip
    return summary, [line for line in logged(folder / "run") if "loss" in line]


def test_the_loss_falls_and_experts_come_to_be_used_alike(trained):
    _, lines = trained
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["balance_loss"] < lines[0]["balance_loss"]
    assert lines[-1]["balance_loss"] == pytest.approx(1, abs=0.05)
    assert all(1 <= line["expert_load"] <= 4 and line["router_z_loss"] > 0 for line in lines)


def test_the_summary_tells_of_the_experts(trained):
    summary, lines = trained
    told = dict(summary.rows())["experts"]
    assert told.startswith("grouped_mm; balance loss 1.0")
    assert "(each micro-batch's own)" in told
    assert "none is dropped" in told
    assert summary.inexact == ("balance_loss", "expert_load")
    assert summary.metrics["expert_load"] <= max(line["expert_load"] for line in lines) * 1.5
    assert summary.parameters - summary.active_parameters == 6 * 3 * 32 * 32  # of eight experts two are met
