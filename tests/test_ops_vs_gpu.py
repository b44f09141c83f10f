"""Single ops beside recordings of them: which say the device's time, what is fitted without a card, what is held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from liger_cases import CASES, peaks, times, traced
from op_recordings import attention, summary
from ops_left_out import Timed, attention_left_out, fitted
from tightfit.trace import Phase

RECORD = json.loads((Path(__file__).parents[1] / "results" / "ops_vs_gpu.json").read_text("utf-8"))
GPU = "NVIDIA A100-SXM4-80GB"
LOSS = {"kernel": "cross_entropy", "x": 4096, "config": '{"B": 8, "T": 2048}', "gpu": GPU, "provider": "huggingface",
        "metric": "speed"}
CONFIGS = {
    "cross_entropy": {"B": 2, "T": 8}, "fused_linear_cross_entropy": {"H": 16, "V": 64, "dtype": "torch.bfloat16"},
    "embedding": {"B": 2, "T": 8, "D": 16},
    "geglu": {"bsz": 2, "hidden_size": 64, "intermediate_size": 32, "hidden_act": "gelu_pytorch_tanh"},
    "swiglu": {"B": 2, "hidden_size": 64, "intermediate_size": 32, "hidden_act": "silu", "dtype": "torch.bfloat16"},
    "layer_norm": {"M": 8, "eps": 1e-6}, "rms_norm": {"M": 8, "eps": 1e-6, "dtype": "torch.bfloat16"},
    "rope": {"seq_len": 8, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "torch.bfloat16"},
    "relu_squared": {"M": 8, "dtype": "torch.bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("kernel", CASES)
def test_a_layers_passes_are_traced(kernel):
    trace = traced(kernel, 64, json.dumps(CONFIGS[kernel]), "a100-80gb-sxm")
    span = trace.span("timed")
    ops = [op for op in trace.ops if span.start <= op.tick < span.stop and op.kernels]
    assert {op.phase for op in ops} == {Phase.FORWARD, Phase.BACKWARD}


def test_times_of_the_host_are_left_out():
    slow, fast = ({**LOSS, "mode": "full", "measured": milliseconds} for milliseconds in ("2.226", "0.02"))
    [found] = times([slow, fast, {**slow, "config": ""}, {**slow, "provider": "liger"}, {**slow, "metric": "memory"}])
    assert (found.device, found.recorded) == ("A100 80GB SXM", 2.226)
    assert abs(found.error) < 0.15
    [forward] = times([{**slow, "mode": "forward"}])
    assert forward.predicted < found.predicted / 2


def test_a_losss_peak_is_the_recorded_one():
    row = {**LOSS, "mode": "full", "peak_mib": "1280.1259765625"}
    [found] = peaks([row, {**row, "kernel": "embedding"}, {**row, "mode": "forward"}])
    assert abs(found.error) < 1e-4


def test_a_share_is_fitted_where_it_errs_least():
    def recorded(at_peak, share):
        return Timed(recorded=at_peak / share + 2.3e-6, tiles=at_peak, at_peak=at_peak, moved=0.0)

    assert fitted([recorded(seconds, 0.7) for seconds in (1e-4, 1e-3, 1e-2)]) == (0.7, pytest.approx(0.0, abs=1e-12))


def test_attention_is_judged_by_the_rates_of_other_cards():
    row = {"device": "A100 80GB SXM", "backend": "FA2", "direction": "fwd", "microseconds": 100.0}
    shape = {"causal": "True", "batch": 2, "seq": 4096, "heads": 16, "kv_heads": 16, "head_dim": 128,
             "dtype": "bfloat16"}
    rows = [{**row, **shape}, {**row, **shape, "device": "RTX 4090"}, {**row, **shape, "backend": "cuDNN 9"}]
    found = attention_left_out([(each, attention(each)) for each in rows])
    assert found["fwd"]["rows"] == 2  # cuDNN was recorded on one card alone


def test_errors_are_summed_up_without_sign():
    assert summary([-0.3, 0.1, 0.2]) == {"rows": 3, "median": 0.2, "p95": 0.3, "median_with_sign": 0.1}


@pytest.mark.parametrize("line", RECORD["held to"], ids=lambda line: line["of"])
def test_the_record_is_within_what_it_is_held_to(line):
    assert line["median"] <= line["limit"]
    assert line["p95"] <= line.get("p95_limit", float("inf"))
