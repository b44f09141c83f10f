"""The cards that a ladder is predicted for."""

from __future__ import annotations

import re

from tightfit.devices import find_device
from tightfit.errors import RecipeError
from tightfit.planning.targets import Target, gpu_target

SIZE = re.compile(r"\s*[\d.]+\s*(gb|gib|mib)\s*", re.IGNORECASE)


def card(gpu: str) -> Target:
    """A card by the catalogue's name, or by a size such as `24GB`. Raises RecipeError for any other word."""
    try:
        if SIZE.fullmatch(gpu):
            return gpu_target(None, gpu, lambda: None)
        return Target(device=find_device(gpu))
    except RecipeError as error:  # whose advice is a plan's, and here the size is the card's name
        raise RecipeError(str(error).replace("gpu-memory:", "gpu:").replace("--gpu-memory ", "--gpu ")) from None
