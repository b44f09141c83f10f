"""What a run's summary says to a person."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from tightfit.training.summary import Summary


def test_a_rate_stands_beside_the_seconds_that_it_is_of() -> None:
    made = Summary(steps=30, first_step=10, seconds=3.9, training_seconds=0.5, compile_seconds=0.0,
                   data_wait_seconds=0.0, samples_per_second=160.0, tokens_per_second=5_120.0, peak_memory=1 << 20,
                   device="CPU")  # fmt: skip
    rows = dict(made.rows())
    assert rows["steps"] == "0.5 s for 20 of 30 steps, since resuming, on CPU"
    assert rows["throughput"] == "160.0 samples/s, 5,120 tokens/s in those steps"
    assert rows["whole run"].startswith("3.9 s since resuming: loading")
    in_one_piece = dict(replace(made, first_step=0).rows())
    assert in_one_piece["steps"] == "0.5 s for 30 steps on CPU"
    assert in_one_piece["whole run"].startswith("3.9 s: loading")
    assert dict(replace(made, first_step=0, steps=1, skipped_steps=1).rows()).items() >= {
        "steps": "0.5 s for 1 step on CPU", "skipped by loss scaling": "1 step"}.items()
    profiled = replace(made, profiled_steps=1)
    assert profiled.rows()[0][1] == "0.5 s for 19 of 30 steps, since resuming, without the profiled one, on CPU"
    assert replace(profiled, first_step=0).rows()[0][1] == "0.5 s for 29 of 30 steps, without the profiled one, on CPU"


def test_a_stopped_run_says_which_step_its_evaluation_is_of() -> None:
    made = Summary(steps=84, seconds=1.0, training_seconds=1.0, compile_seconds=0.0, data_wait_seconds=0.0,
                   samples_per_second=1.0, tokens_per_second=1.0, peak_memory=1, device="CPU", eval_loss=5.5,
                   eval_step=50)  # fmt: skip
    assert [name for name, _ in made.rows() if "held-out" in name] == ["held-out at step 50"]
    assert "held-out" in dict(replace(made, eval_step=84).rows())


def test_an_evaluation_that_overflowed_is_written_down_as_not_known(tmp_path: Path) -> None:
    made = Summary(steps=1, seconds=1.0, training_seconds=1.0, compile_seconds=0.0, data_wait_seconds=0.0,
                   samples_per_second=1.0, tokens_per_second=1.0, peak_memory=1, device="CPU", eval_loss=math.nan,
                   metrics={"balance_loss": math.inf, "z_loss": 1.0}, attention_kernels=("flash",))  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(made.to_dict(), allow_nan=False))
    assert Summary.read(tmp_path / "summary.json") == replace(made, eval_loss=None,
                                                                  metrics={"z_loss": 1.0})
