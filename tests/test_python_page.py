"""The page on the Python API: its examples, one program, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_its_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "notes.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 300)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)), names)
    assert names["summary"].steps == 8
    assert len(names["listener"].losses) == 8
    assert names["plan"].recipe.micro_batch_size == 4
    assert names["applied"].left_to_you
    said = capsys.readouterr().out
    assert "held-out loss" in said
    assert "on RTX 4090" in said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["heard", "named", "own"]
