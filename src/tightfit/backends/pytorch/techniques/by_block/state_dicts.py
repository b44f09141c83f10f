"""State dicts of a model whose updates wait: who asks for one between steps gets the updated weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from tightfit.backends.pytorch.techniques.by_block.update import UpdateByBlock


class StateDictHooks:
    """Hooks of a model's `state_dict` and `load_state_dict`. A copy of the model has weights of its own, and copied or
    pickled hooks do nothing.

    update: a weak reference to the update, which holds on to the model itself.
    """

    update: Callable[[], UpdateByBlock | None] = staticmethod(lambda: None)

    def __init__(self, update: Callable[[], UpdateByBlock | None]) -> None:
        self.update = update

    def register(self, model: nn.Module) -> None:
        """On every module: a part of the model may be asked alone."""
        self._handles = [
            handle for module in model.modules() for handle in (
                module.register_state_dict_pre_hook(self.flush), module.register_load_state_dict_pre_hook(self.flush),
                module.register_load_state_dict_post_hook(self.reload))]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def flush(self, *_: Any) -> None:
        """Before weights are read, or written: an update that waits would change those that were."""
        if (update := self.update()) is not None:
            update.flush_between_steps()

    def reload(self, *_: Any) -> None:
        """Behind writing."""
        if (update := self.update()) is not None:
            update.reload()

    def __getstate__(self) -> dict[str, Any]:
        return {}
