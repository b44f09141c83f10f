"""A dispatch mode that sees every op and costs little."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is asked for every op outside of compiled regions, which report themselves. torch's guard
    against compiling the mode itself is left out: it takes longer than most of the mode's work."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # private to torch; one that does not ask keeps its guard
        return False
