"""A dispatch mode that sees every op and costs little, and functions that Dynamo leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is asked for every op outside of compiled regions, which report themselves. torch's guard
    against compiling the mode itself is left out: it takes longer than most of the mode's work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        never_compiled(type(self).__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # private to torch; one that does not ask keeps its guard
        return False


def never_compiled(function: Callable[..., Any]) -> None:
    """Have Dynamo run a function, and all that it calls, as it is. Private to torch.

    In a compiled block some ops run one by one: behind a graph break, and in torch's own modules, whose frames Dynamo
    passes over. What torch calls for such an op would be the next frame that Dynamo finds, and compiles. This mark on
    the function's code costs nothing where it is called; `torch.compiler.disable` puts a call around each.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
