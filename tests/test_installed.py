"""The package as a person installs it: built, put into a fresh environment with no library of the tests, and used from
another folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_dependencies import EXTRAS, ROOT, libraries

pytestmark = pytest.mark.cold
TINY = ["seq_len=32", "batch_size=4", "micro_batch_size=4", "precision=bf16", "checkpointing=none", "compile=off",
        "optimizer=adamw", "attention=sdpa", "loss=plain", "offload=none", "cache_dir=cache"]  # fmt: skip


def said(*command: str | Path, cwd: Path) -> str:
    """What a command prints; nothing of this process's Python is on its path, and pip is set as the person has it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    said(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("tightfit-*.whl"))


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the fresh environment's commands are."""
    folder = tmp_path_factory.mktemp("environment")
    said(sys.executable, "-m", "venv", folder, cwd=folder)
    found = folder / "bin"
    said(found / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel,
         cwd=folder)
    yield found
    shutil.rmtree(folder)  # gigabytes, which pytest would keep


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*.*") if "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as content:
        assert {name for name in content.namelist() if ".dist-info/" not in name} == files


def test_it_runs_where_only_its_dependencies_are(bin_folder: Path, tmp_path: Path) -> None:
    tightfit = bin_folder / "tightfit"
    listed = said(bin_folder / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path).lower()
    there = dict(line.split("==") for line in listed.splitlines())
    assert not libraries(EXTRAS["dev"]) & there.keys()
    assert said(tightfit, "--version", cwd=tmp_path) == f"tightfit {there['tightfit']}\n"
    assert "train" in said(tightfit, "--help", cwd=tmp_path)
    assert "quickstart" in said(tightfit, "recipes", cwd=tmp_path)
    assert "gpt2 on RTX 4090" in said(tightfit, "plan", "gpt2", "--gpu", "rtx-4090", *TINY, cwd=tmp_path)
    (tmp_path / "notes.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 300)
    said(tightfit, "train", "moe-tiny", "data=notes.txt", *TINY, "device=cpu", "max_steps=4", "profile_step=4",
         "output_dir=run", cwd=tmp_path)
    said(tightfit, "report", "run", cwd=tmp_path)
    assert "moe-tiny" in (tmp_path / "run/report.html").read_text("utf-8")
