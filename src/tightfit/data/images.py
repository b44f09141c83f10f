"""Samples of images: files in a folder for each class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.corpora import missing_path
from tightfit.data.samples import Example
from tightfit.data.tokenized import classes_by_number
from tightfit.errors import DataError, MissingLibrary
from tightfit.model_facts import ModelFacts
from tightfit.models import resolve_source
from tightfit.recipe import Recipe
from tightfit.tasks import Array

SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that such files hold in truth; Pillow's readers of rarer ones run programs, or warn and go on."""
CENTRED_SCALE = (0.5, 0.5)
"""Mean and standard deviation of pixels, rescaled to 0 to 1, where the model stores no image processor."""
CHANNEL_MODES = {1: "L", 3: "RGB"}
"""Pillow's names of images with so many channels."""


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Image files and their classes. pixels: reads and resizes an image when it is asked for."""

    files: tuple[Path, ...]
    classes: tuple[int, ...]
    pixels: Callable[[Path], Array]

    def __len__(self) -> int:
        return len(self.files)

    def example(self, index: int, epoch: int) -> Example:
        label = np.asarray(self.classes[index], dtype=np.int64)
        return Example({"pixel_values": self.pixels(self.files[index])}, label)


def open_images(
    source: str, facts: ModelFacts, num_labels: int | None, scale: tuple[Any, Any], known: tuple[str, ...] = ()
) -> tuple[ImageFolder, tuple[str, ...]]:
    """The images in `source/<class>/`, and the names of the classes by number. scale: as of `pixel_scale`. known: the
    names, where there are some already.

    Raises DataError for other contents, and for fewer classes than the model's where no `num_labels` asks for those.
    """
    _pillow()
    folder = Path(source).expanduser()
    if not folder.exists():
        raise missing_path("data", source, folder)
    classes = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    found = {c.name: sorted(p for p in c.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()) for c in classes}
    names = tuple(name for name, files in found.items() if files)
    if not names:
        raise DataError(f"data: {source!r} holds no images; write a folder with one folder of png or jpg files a class")
    if known and (strange := [name for name in names if name not in known]):
        raise DataError(f"data.eval_source: {source!r} has the class {strange[0]!r}, which is none of the training "
                        f"data's ({', '.join(known)}); rename or remove that folder")
    names = known or classes_by_number(names, facts, num_labels)
    needed = max(len(names), 2)
    if needed > facts.num_labels or (num_labels is None and needed < facts.num_labels):
        raise DataError(f"data: {source!r} has {len(names)} classes and the model {facts.num_labels}; "
                        f"write num_labels={needed}")
    if not facts.image_size or facts.num_channels not in CHANNEL_MODES:
        raise DataError(f"model: images of size {facts.image_size} with {facts.num_channels} channels cannot be made "
                        "from image files; write a model that reads square images of 1 or 3 channels")
    pairs = [(file, number) for number, name in enumerate(names) for file in found.get(name, ())]
    files, numbers = zip(*pairs, strict=True)
    pixels = partial(read_image, size=facts.image_size, channels=facts.num_channels, scale=scale)
    return ImageFolder(files=files, classes=numbers, pixels=pixels), names


def pixel_scale(recipe: Recipe, channels: int) -> tuple[Any, Any]:
    """Mean and standard deviation by which pixels, rescaled to 0 to 1, are normalized: those of the image processor
    that is stored with the model's weights, one for each channel; else `CENTRED_SCALE`."""
    source, found = resolve_source(recipe), dict[str, Any]()
    if recipe.pretrained and source.kind in ("folder", "hub"):
        from transformers import ImageProcessingMixin  # for stored models alone

        from tightfit.hub import only_local

        with suppress(OSError):  # there is none
            found, _ = ImageProcessingMixin.get_image_processor_dict(
                source.name, local_files_only=only_local(source.name))
    if not found.get("do_normalize", True):
        return 0.0, 1.0
    named = found.get("image_mean"), found.get("image_std")
    fits = all(isinstance(values, list) and len(values) == channels for values in named)
    return named if fits else CENTRED_SCALE


def read_image(path: Path, size: int, channels: int, scale: tuple[Any, Any] = CENTRED_SCALE) -> Array:
    """An image as float32 (channels, size, size), its 0 to 1 centred by `scale`. Raises DataError for a broken file."""
    image_module = _pillow()
    try:
        with image_module.open(path, formats=IMAGE_FORMATS) as image:
            small = image.convert(CHANNEL_MODES[channels]).resize((size, size), image_module.Resampling.BILINEAR)
            pixels = np.asarray(small, dtype=np.float32).reshape(size, size, channels)
    except (OSError, SyntaxError, image_module.DecompressionBombError) as error:  # SyntaxError: some broken PNG files
        raise DataError(f"data: {path} is not a readable image: {error}") from None
    mean, deviation = (np.asarray(numbers, dtype=np.float32) for numbers in scale)
    return np.ascontiguousarray(((pixels / 255.0 - mean) / deviation).transpose(2, 0, 1))


def image_processor(facts: ModelFacts, scale: tuple[Any, Any] = CENTRED_SCALE) -> dict[str, Any]:
    """The configuration of transformers' image processor that makes the same pixels as `read_image`."""
    mean, deviation = (np.broadcast_to(numbers, facts.num_channels).tolist() for numbers in scale)
    return {
        "image_processor_type": "ViTImageProcessor", "size": {"height": facts.image_size, "width": facts.image_size},
        "do_resize": True, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": mean, "image_std": deviation,
    }  # fmt: skip


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingLibrary("pillow", "data: a folder of images") from None
    return Image
