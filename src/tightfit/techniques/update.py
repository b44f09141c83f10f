"""The update of the weights: when a global batch's gradients are clipped, applied and dropped."""

from __future__ import annotations

from typing import ClassVar

from tightfit.techniques.base import Technique, technique


class Update(Technique):
    slot: ClassVar[str] = "update"
    may_be_auto: ClassVar[bool] = False


@technique
class AfterBackward(Update):
    """Clip, step the optimizer and drop the gradients as soon as the last backward pass is done."""

    name: ClassVar[str] = "after-backward"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline: every gradient is there at once, and the optimizer's temporaries beside them"
