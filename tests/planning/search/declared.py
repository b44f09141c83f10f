"""A model whose costs are declared: bytes a parameter by number formats, samples' bytes, tokens a second by choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from tests.planning.toy import replay as toy_replay
from tests.planning.toy import toy_tools
from tightfit.planning.timing.step_time import StepTime
from tightfit.trace import Allocation, Category, Span, Trace

GIB = 1 << 30


@dataclass
class Declared:
    """parameters: their number. sample: bytes that one keeps with nothing recomputed; a tenth with every block, the
    half with any other kind. speeds: tokens a second by precision and optimizer, the fastest elsewhere. compiled: how
    many times as fast a compiled step is. copied: bytes a parameter of autocast's copies in it. recomputing: how many
    times as long a step takes that recomputes. streamed: share of weights, gradients and states that is left on the
    device where blocks wait in host memory."""

    parameters: float
    sample: float
    speeds: dict
    compiled: float = 1.0
    copied: float = 2.0
    recomputing: float = 1.1
    streamed: float = 1.0
    calls: list = field(default_factory=list)

    def predict(self, recipe, device):
        self.calls.append(recipe)
        assert not recipe.refusals(device)
        precision, optimizer = recipe.precision, recipe.optimizer
        copies = (self.copied if recipe.compile.compiles else 2) if precision.autocast else 0
        kept = {"none": 1.0, "every-block": 0.1}.get(recipe.checkpointing.name, 0.5)
        held = [(Category.WEIGHTS, precision.weight_bytes + copies), (Category.GRADIENTS, precision.weight_bytes),
                (Category.OPTIMIZER, optimizer.bytes_beside(precision.weight_rounding))]
        if recipe.trainable.freezes:
            learned = [(kind, recipe.trainable.share * each) for kind, each in held[1:]]
            held = [(Category.WEIGHTS, recipe.base.weight_bytes(recipe)), *learned]
        if recipe.offloaded.needs_by_block:
            held = [(kind, self.streamed * each) for kind, each in held]
        alone = recipe.micro_batch_size == recipe.batch_size  # whose passes find no gradients
        count = round(self.parameters)
        made = [Allocation(born=5 if alone and category is Category.GRADIENTS else 0, died=None, category=category,
                           bytes=round(count * each), shape=(count,)) for category, each in held]
        made.append(Allocation(born=3, died=5, bytes=round(self.sample * kept * recipe.micro_batch_size)))
        spans = [Span(name="step 1", start=1, stop=9, step=1), Span(name="forward", start=2, stop=4, step=1),
                 Span(name="backward", start=4, stop=6, step=1), Span(name="optimizer", start=6, stop=8, step=1)]
        return Trace(origin="predicted", allocations=made, spans=spans)

    def seconds(self, trace, recipe, device):
        speed = self.speeds.get((recipe.precision.name, recipe.optimizer.name), max(self.speeds.values()))
        speed *= self.compiled if recipe.compile.compiles else 1.0
        speed /= self.recomputing if recipe.checkpointing.recomputes else 1.0
        return StepTime(seconds=recipe.batch_size * recipe.seq_len / speed)

    def tools(self, margin=None):
        return toy_tools(self.predict, self.seconds, replay, margin)


replay = partial(toy_replay, wasted=0)
