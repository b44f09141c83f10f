"""Images in folders named for their classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.corpora import missing_path
from tightfit.data.samples import Example
from tightfit.errors import DataError, MissingLibrary
from tightfit.models import ModelFacts
from tightfit.tasks import Array

ENDINGS = frozenset({".png", ".jpg", ".jpeg"})
MEAN, DEVIATION = 0.5, 0.5
"""Pixels, scaled to 0 to 1, are centred and divided by these."""

MODES = {1: "L", 3: "RGB"}
"""Pillow's names of images with so many channels."""


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Image files and their classes; an image is read and resized when it is asked for."""

    files: tuple[Path, ...]
    classes: tuple[int, ...]
    size: int
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def example(self, index: int, epoch: int) -> Example:
        pixels = read_image(self.files[index], self.size, self.channels)
        return Example({"pixel_values": pixels}, np.asarray(self.classes[index], dtype=np.int64))


def open_images(source: str, facts: ModelFacts, num_labels: int | None) -> tuple[ImageFolder, tuple[str, ...]]:
    """The images in `source/<class>/`, and the names of the classes, sorted.

    Raises DataError for other contents, and for fewer classes than the model's where no `num_labels` asks for those.
    """
    _pillow()
    folder = Path(source).expanduser()
    if not folder.exists():
        raise missing_path("data", source, folder)
    classes = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    found = {c.name: sorted(p for p in c.iterdir() if p.suffix.lower() in ENDINGS and p.is_file()) for c in classes}
    names = tuple(name for name, files in found.items() if files)
    if not names:
        raise DataError(f"data: {source!r} holds no images; write a folder with one folder of png or jpg files a class")
    needed = max(len(names), 2)
    if needed > facts.num_labels or (num_labels is None and needed < facts.num_labels):
        raise DataError(f"data: {source!r} has {len(names)} classes and the model {facts.num_labels}; "
                        f"write num_labels={needed}")  # fmt: skip
    if not facts.image_size or facts.num_channels not in MODES:
        raise DataError(f"model: images of size {facts.image_size} with {facts.num_channels} channels cannot be made "
                        "from image files; write a model that reads square images of 1 or 3 channels")  # fmt: skip
    pairs = [(file, number) for number, name in enumerate(names) for file in found[name]]
    files, numbers = zip(*pairs, strict=True)
    return ImageFolder(files=files, classes=numbers, size=facts.image_size, channels=facts.num_channels), names


def read_image(path: Path, size: int, channels: int) -> Array:
    """An image as float32 (channels, size, size), its 0 to 1 centred on `MEAN`. Raises DataError for a broken file."""
    image_module = _pillow()
    try:
        with image_module.open(path) as image:
            small = image.convert(MODES[channels]).resize((size, size), image_module.Resampling.BILINEAR)
            pixels = np.asarray(small, dtype=np.float32).reshape(size, size, channels)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some broken PNG files
        raise DataError(f"data: {path} is not a readable image: {error}") from None
    return np.ascontiguousarray(((pixels / 255.0 - MEAN) / DEVIATION).transpose(2, 0, 1))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingLibrary("Pillow", "data: a folder of images", "pillow") from None
    return Image
