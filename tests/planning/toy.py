"""A toy model whose step is a closed form: blocks of attention, feed-forward and norms, of sizes drawn by lot.

`Toy.predict` writes the trace that a backend would: every technique keeps, drops and recomputes what it says.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from tests.failing import failing
from tightfit.backends import load_backend
from tightfit.devices import MIB, Device
from tightfit.errors import ModelError
from tightfit.planning.allocator.settings import AllocatorSettings
from tightfit.planning.estimate import Margin, Tools
from tightfit.planning.timing.step_time import StepTime
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Category, Op, OpClass, Phase, Span, Trace, UntracedMemory

PARTS = ("attention", "mlp", "norm")


@dataclass
class Recorder:
    """Ticks, events and spans in the making."""

    tick: int = 0
    ops: list = field(default_factory=list)
    allocations: list = field(default_factory=list)
    spans: list = field(default_factory=list)
    phase: Phase = Phase.SETUP

    def next(self):
        self.tick += 1
        return self.tick

    def make(self, size, name, shape, category=Category.TEMPORARY, module=""):
        made = Allocation(born=self.next(), died=None, bytes=int(size), category=category, op=name, shape=shape,
                          dtype="x", module=module)
        self.allocations.append(made)
        return made

    def free(self, *made):
        for allocation in made:
            allocation.died = self.next()

    def run(self, name, flops, moved, shape, phase=None):
        self.ops.append(Op(name=name, tick=self.next(), phase=phase or self.phase, op_class=OpClass.OTHER,
                           shapes=(shape,), flops=int(flops), bytes_read=int(moved)))

    def span(self, name, work, step=0, times=1):
        start = self.next()
        work()
        self.spans.append(Span(name=name, start=start, stop=self.next(), step=step, times=times))


@dataclass(frozen=True)
class Toy:
    """weights: numbers in a block. saved: bytes a part keeps a sample and block in fp32. flops: of a part's forward
    pass a sample. entry: bytes of a block's input. rates: FLOPs a second by precision. overhead: seconds an op."""

    blocks: int
    weights: int
    saved: dict
    flops: dict
    entry: int
    rates: dict
    bandwidth: float
    overhead: float
    fused: float
    context: int = 3 * MIB
    calls: list = field(default_factory=list)

    @classmethod
    def drawn(cls, seed):
        draw = random.Random(seed)
        half = 10 ** draw.uniform(11.5, 12.5)
        return cls(
            blocks=draw.randint(2, 5),
            weights=draw.randint(1, 30) * 40_000,
            saved={part: draw.randint(1, 12) * 100_000 for part in PARTS},
            flops={"attention": draw.randint(10**8, 10**9), "mlp": draw.randint(10**8, 10**9), "norm": 10**6},
            entry=draw.randint(1, 3) * 20_000,
            rates={"bf16": half, "fp16": half, "bf16-pure": half * draw.uniform(1.0, 1.2),
                   "fp32": half * draw.uniform(0.3, 0.6)},
            bandwidth=10 ** draw.uniform(9.5, 11),
            overhead=10 ** draw.uniform(-5.5, -4),
            fused=draw.uniform(0.3, 0.9),
        )

    def predict(self, recipe: Recipe, device: Device) -> Trace:
        self.calls.append(recipe)
        assert not recipe.refusals(device)
        micro: Any = recipe.micro_batch_size
        sizes = [micro] * (recipe.batch_size // micro)
        rest = recipe.batch_size % micro
        sizes += [rest] if rest else []
        first, *others = sizes
        groups = [(first, 1), *((size, len(list(alike))) for size, alike in itertools.groupby(others))]
        run = _Run(self, recipe)
        r = run.recorder
        run.build()
        r.span("step 1", lambda: run.step(1, groups[:1]), step=1)
        r.span("step 2", lambda: run.step(2, groups), step=2)
        r.span("evaluation", lambda: run.evaluate(first))
        r.span("save", lambda: r.free(r.make(100, "copy", (100,))))
        untraced = [UntracedMemory(name="context", bytes=self.context, where="context", source="drawn"),
                  UntracedMemory(name="workspace", bytes=MIB, where="allocator", source="drawn")]
        return Trace(origin="predicted", ops=r.ops, allocations=r.allocations, spans=r.spans, untraced=untraced)

    untraced = None
    model_size = staticmethod(load_backend("pytorch").model_size)

    def seconds(self, trace: Trace, recipe: Recipe, device: Device) -> StepTime:
        rate = self.rates[recipe.precision.name]
        total = sum(times * (op.flops / rate + op.bytes_read / self.bandwidth + self.overhead)
                    for op, times in trace.step_ops())
        return StepTime(seconds=total)

    def tools(self, margin: Margin | None = None) -> Tools:
        return toy_tools(self.predict, self.seconds, replay, margin)


def toy_tools(predict, step_time, replay, margin: Margin | None = None) -> Tools:
    """Tools that know no model's size, and of each trace what it says of itself."""

    return Tools(predict=predict, replay=replay, step_time=step_time, mfu=lambda r, d, s: 0.5,
                 margin=margin or Margin(), untraced=lambda r, d, trace: trace.untraced,
                 model_size=failing(ModelError("model: its size is not known")))


def replay(trace: Trace, capacity: int | None, settings: AllocatorSettings, wasted=Fraction(1, 30)):
    """An allocator that reserves so much more than it gives out."""
    tick, peak = trace.peak()
    peak += sum(u.bytes for u in trace.untraced if u.where == "allocator")
    reserved = math.ceil(peak * (1 + wasted))
    missing = 0 if capacity is None else max(reserved - capacity, 0)
    return SimpleNamespace(peak_allocated=peak, peak_tick=tick, peak_reserved=reserved, missing=missing,
                           given_back=0, pieces=0, retries=(), fits="no" if missing else "yes")


class _Run:
    def __init__(self, toy, recipe):
        self.toy, self.recipe, self.recorder = toy, recipe, Recorder()
        self.states = {}
        self.gradients = {}

    def build(self):
        for block in range(self.toy.blocks):
            self.recorder.make(self.toy.weights * self._weight_bytes(), "", (self.toy.weights,), Category.WEIGHTS,
                               f"h.{block}.w")

    def step(self, number, groups):
        r = self.recorder
        for size, times in groups:
            saved = []
            r.phase = Phase.FORWARD
            r.span("forward", lambda size=size, saved=saved: self.forward(size, saved), number, times)
            r.phase = Phase.BACKWARD
            r.span("backward", lambda size=size, saved=saved: self.backward(size, saved), number, times)
        r.phase = Phase.OPTIMIZER
        r.span("optimizer", self.update, number)

    def forward(self, size, saved):
        r = self.recorder
        for block in range(self.toy.blocks):
            cast = self._cast()
            keeps = self._keeps(block)
            parts = {part: self._part(part, size) for part in PARTS}
            for part, share in keeps.items():
                r.free(parts.pop(part)) if share == 0 else None
                if 0 < share < 1:
                    r.free(parts.pop(part))
                    parts[part] = self._kept(part, size, share)
            entry = r.make(size * self.toy.entry, "entry", (size, self.toy.entry), Category.ACTIVATIONS)
            saved.append((parts, entry, cast))

    def backward(self, size, saved):
        r = self.recorder
        for block in reversed(range(self.toy.blocks)):
            parts, entry, cast = saved[block]
            keeps = self._keeps(block)
            for part, share in keeps.items():
                if share < 1:
                    extra = self._part(part, size, Phase.RECOMPUTE)
                    if part in parts:
                        r.free(parts.pop(part))
                    parts[part] = extra
            flows = r.make(size * self.toy.entry * 4, "flow", (size, self.toy.entry * 4))
            for part in PARTS:
                r.run(f"{part}.backward", 2 * size * self.toy.flops[part], 2 * size * self._bytes(part), (size, 7))
            gradient = r.make(self.toy.weights * self._weight_bytes(), "gradient", (self.toy.weights,))
            if block in self.gradients:
                r.run("add", 0, 2 * gradient.bytes, gradient.shape)
                r.free(gradient)
            else:
                gradient.category, gradient.category_since = Category.GRADIENTS, gradient.born
                self.gradients[block] = gradient
            r.free(flows, entry, *parts.values(), *cast)
        saved.clear()

    def update(self):
        r, toy = self.recorder, self.toy
        optimizer = self.recipe.optimizer
        each = optimizer.bytes_beside(self.recipe.precision.weight_rounding)
        for block in range(toy.blocks):
            size = round(toy.weights * each)
            if block not in self.states:
                self.states[block] = r.make(size, "state", (size,), Category.OPTIMIZER)
            passing = r.make(toy.weights // 4, "passing", (toy.weights // 4,))
            r.run(f"{optimizer.name}.update", 0, 2 * size + toy.weights * 12, (toy.weights,))
            r.free(passing)
        r.free(*self.gradients.values())
        self.gradients.clear()

    def evaluate(self, size):
        r = self.recorder
        r.phase = Phase.EVALUATION
        for _ in range(self.toy.blocks):
            r.free(*[self._part(part, size) for part in PARTS])

    # Sizes

    def _weight_bytes(self):
        return 2 if self.recipe.precision.name == "bf16-pure" else 4

    def _cast(self):
        """Autocast's copy of a block's weights."""
        if self.recipe.precision.name not in ("bf16", "fp16"):
            return []
        return [self.recorder.make(self.toy.weights * 2, "cast", (self.toy.weights,))]

    def _bytes(self, part):
        size = self.toy.saved[part]
        if self.recipe.precision.name != "fp32" and part != "norm":
            size //= 2
        if self.recipe.compile.name != "off" and part == "norm":
            size = round(size * self.toy.fused)
        return size

    def _part(self, part, size, phase=None):
        r = self.recorder
        r.run(part, size * self.toy.flops[part], 2 * size * self._bytes(part), (size, 7), phase)
        return r.make(size * self._bytes(part), part, (size, self._bytes(part)), Category.ACTIVATIONS)

    def _kept(self, part, size, share):
        kept = round(self._bytes(part) * share)
        return self.recorder.make(size * kept, f"half {part}", (size, kept), Category.ACTIVATIONS)

    def _keeps(self, block):
        """What of each part is kept for the backward pass."""
        kind = self.recipe.checkpointing
        everything, nothing = dict.fromkeys(PARTS, 1), dict.fromkeys(PARTS, 0)
        if kind.name == "none":
            return everything
        if kind.name in ("every-block", "segments"):
            return nothing
        if kind.name == "every-nth":
            return nothing if block % kind.n == 0 else everything
        if kind.name == "selective":
            return {"matmul-and-attention": {**everything, "norm": 0}, "attention": {**nothing, "attention": 1},
                    "every-other-matmul": {"attention": 1, "mlp": 0.5, "norm": 0}}[kind.keep]
        if kind.name == "memory-budget":
            return {"attention": 1, "mlp": kind.budget, "norm": 0}
        return {**everything, kind.name: 0}
