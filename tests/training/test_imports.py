"""Training loads what training needs: nothing that predicts, measures or searches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 115
"""Modules of ours in a process that trained on a processor."""

UNNEEDED = (
    "tightfit.backends.measuring", "tightfit.backends.pytorch.follow", "tightfit.backends.pytorch.measure",
    "tightfit.backends.pytorch.simulate",
    "tightfit.planning.allocator", "tightfit.planning.search", "tightfit.planning.timing", "tightfit.planner",
    "tightfit.display", "tightfit.profiling.measure", "tightfit.profiling.profile", "tightfit.profiling.report",
    "tightfit.recipe.hf_arguments",
)  # fmt: skip
"""Rooms that predict, measure, search or report."""

TRAIN = """
import json, sys
from tightfit.cli import app
app(sys.argv[1:], standalone_mode=False)
print("loaded", json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "tightfit")))
"""


def test_training_loads_no_simulation_no_measuring_and_no_search(tmp_path: Path, shared_cache: Path) -> None:
    words = ["train", "quickstart", f"data={tmp_path / 'notes.txt'}", "max_steps=2", "eval_samples=8", "device=cpu",
             "seq_len=32", "batch_size=4", "model_overrides.n_layer=1", f"output_dir={tmp_path / 'run'}",
             f"cache_dir={shared_cache}"]  # fmt: skip
    (tmp_path / "notes.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 300)
    done = subprocess.run([sys.executable, "-c", TRAIN, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.rpartition("loaded ")[2])
    assert [name for name in loaded if any(name == room or name.startswith(f"{room}.") for room in UNNEEDED)] == []
    assert len(loaded) <= MOST
