"""The cards that a ladder is of: the one that is predicted for, the one that was published on."""

from __future__ import annotations

from tightfit.devices import find_device, says_memory
from tightfit.errors import RecipeError
from tightfit.ladder.rungs import Ladder
from tightfit.planning.targets import Target, gpu_target


def card(gpu: str) -> Target:
    """A card by the catalogue's name, or by a size such as `24GB`. Raises RecipeError for any other word."""
    try:
        if says_memory(gpu):
            return gpu_target(None, gpu, lambda: None)
        return Target(device=find_device(gpu))
    except RecipeError as error:  # whose advice is a plan's, and here the size is the card's name
        raise RecipeError(str(error).replace("gpu-memory:", "gpu:").replace("--gpu-memory ", "--gpu ")) from None


def published_card(ladder: Ladder) -> str:
    """The catalogue's name of the card that a ladder was published on; what was said of it where that named none."""
    return card_name(ladder.gpu) if ladder.gpu is not None and ladder.card_named else ladder.published_on


def card_name(device: str) -> str:
    """The catalogue's name of a device, however that is written; the device's own where the catalogue has none."""
    try:
        return find_device(device).name
    except RecipeError:
        return device
