"""Checkpoints that are whole or not there: written under a temporary name, checked, renamed.

    checkpoints/step-00000100/
        weights.safetensors, optimizer.safetensors, random.safetensors
        checkpoint.json       step, the loop's and the backend's values, each file's size and CRC-32
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.backends.base import GlobalBatchSource
from tightfit.errors import CheckpointError, one_line, remedy
from tightfit.files import WRITING, replacing_folder
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, Array
from tightfit.training.schedule import length_field

MANIFEST = "checkpoint.json"
NAME = re.compile(r"step-\d{8,}")
"""A checkpoint's name; a copy by another one, such as `step-00000100.bak`, is its owner's and stays as it is."""
ELSEWHERE = "write output_dir=... and run again"
"""Advice where a folder cannot be written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk. `meta` is what the backend returned when it was saved, `loop` what the loop gave."""

    folder: Path
    step: int
    meta: dict[str, Any]
    loop: dict[str, Any]


def save(parent: Path, step: int, write: Callable[[Path], dict[str, Any]], loop: dict[str, Any]) -> Path:
    """Let `write` fill a folder, then give it its name; a crash at any moment leaves the older ones untouched.

    Raises CheckpointError where the disk is full or not writable; what was written is removed.
    """
    final = folder_of(parent, step)
    try:
        with replacing_folder(final) as temporary:
            meta = write(temporary)
            files = {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in temporary.iterdir()}
            manifest = {"step": step, "loop": loop, "files": files, "meta": meta}
            written = json.dumps({"checkpoint": manifest, "crc32": _manifest_crc32(manifest)})
            (temporary / MANIFEST).write_text(written, "utf-8")
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {parent}: {one_line(error.__cause__ or error)}; "
            f"older checkpoints are untouched; {remedy(error, ELSEWHERE)}"
        ) from None
    return final


def folder_of(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def prune(parent: Path, keep: int | None, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints, None for all, and that of the step `best`, and what a crash left
    half written."""
    for folder in folders(parent)[: -keep if keep else 0]:
        if best is None or folder != folder_of(parent, best):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in parent.glob(f".*{WRITING}"):
        shutil.rmtree(folder, ignore_errors=True)


def folders(parent: Path) -> list[Path]:
    """The checkpoints under `parent`, oldest first."""
    return sorted(path for path in parent.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())


def steps(parent: Path) -> list[int]:
    """The steps that have a checkpoint under `parent`."""
    return [int(path.name.removeprefix("step-")) for path in folders(parent)]


def read(folder: Path) -> Checkpoint:
    """A checkpoint whose every file is as it was written. Raises CheckpointError naming what is not."""
    try:
        written = json.loads((folder / MANIFEST).read_text("utf-8"))
        manifest = written["checkpoint"]
        for name, expected in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"] or _crc32(path) != expected["crc32"]:
                raise CheckpointError(f"{path}: not as it was written")
        whole = written["crc32"] == _manifest_crc32(manifest)
        if not whole or not manifest["files"] or not all(isinstance(manifest[key], dict) for key in ("meta", "loop")):
            raise CheckpointError(f"{folder / MANIFEST}: not as it was written")
        if folder != folder_of(folder.parent, manifest["step"]):
            raise CheckpointError(f"{folder}: it is of step {manifest['step']}, and was renamed")
        return Checkpoint(folder=folder, step=manifest["step"], meta=manifest["meta"], loop=manifest["loop"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {one_line(error)}") from None


def newest(parent: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; a broken one is put aside, saying so. None where there is none.

    Raises CheckpointError where all are broken: starting anew would hide the loss.
    """
    present, broken = folders(parent), []
    for folder in reversed(present):
        try:
            found = read(folder)
        except CheckpointError as error:
            log(f"checkpoint {folder.name} is broken ({error}); falling back to the one before")
            broken.append(folder)
            continue
        for other in broken:
            shutil.rmtree(other.with_name(f"broken-{other.name}"), ignore_errors=True)
            other.rename(other.with_name(f"broken-{other.name}"))
        return found
    if present:
        raise CheckpointError(f"every checkpoint in {parent} is broken; restore one, or write "
                              "another output_dir=... to start anew")
    return None


def require_continuing(checkpoint: Checkpoint, recipe: Recipe, source: GlobalBatchSource) -> None:
    """Raise CheckpointError where a run is longer than the recipe says, or its data was another."""
    if checkpoint.step > recipe.max_steps:
        field = length_field(recipe)
        raise CheckpointError(f"{field}: this run has already taken {checkpoint.step} steps, more than "
                              f"{recipe.max_steps}; write a larger {field}, or another output_dir")
    if checkpoint.loop.get("data") != data_signature(source):
        raise CheckpointError("data: it is not what it was when this run began (its first global batch or its "
                              "number of batches differs); bring it back, or write another output_dir")


def data_signature(source: GlobalBatchSource) -> list[int]:
    """The global batches in an epoch, and checksums of the first one's arrays without their
    padding, which are the same in micro-batches of any size."""
    values: dict[str, int] = {}

    def add(name: str, array: Array) -> None:
        values[name] = zlib.crc32(array.tobytes(), values.get(name, 0))

    for batch in source.global_batch(0).micro_batches:
        for name, array in batch.inputs.items():
            real = batch.labels != IGNORE if name == "decoder_input_ids" else batch.padding
            add(name, array if real is None or real.shape != array.shape else array[real])
        add("labels", batch.labels[batch.labels != IGNORE])
    return [len(source), *values.values()]


def _manifest_crc32(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value
