"""What a search knows of each combination, and how it learns more: few traces, the rest made from them.

A combination is traced at two micro-batches; without checkpointing first. With checkpointing it runs the same ops, so
one trace of its own is enough. Another optimizer's step is put into the traces of the same forward and backward
passes. Everything a search reads goes through here, so that nothing is traced twice and the number of traces is kept
below a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.planning.estimate import Margin, Tools, capacity, fit, join, step_cost
from tightfit.planning.plan import Estimate
from tightfit.planning.search.budget import Budget
from tightfit.planning.search.candidates import Config, describe
from tightfit.planning.search.interpolation import transfer
from tightfit.planning.search.line_times import LineTimes
from tightfit.planning.search.lines import Line, parameters, resident
from tightfit.planning.search.splicing import with_optimizer
from tightfit.recipe import Recipe
from tightfit.techniques.checkpointing import NoCheckpointing
from tightfit.techniques.compile import NoCompile
from tightfit.trace import Phase, Trace

PROBES = (2, 11)
"""Micro-batches of the two traces. Not 1, for shapes of 1 can take other paths; and one that no width of a model is a
multiple of, so that an activation is not mistaken for a weight of the same shape."""

COMPILED_PROBES = (9, 13)
"""The same of what is compiled: below UNROLLED samples, Inductor writes sums over a micro-batch out, in kernels of
other kinds."""

UNROLLED = 8
"""Inductor's `unroll_reductions_threshold`."""

MANY_OPS = 1000
"""An optimizer of more ops than this takes most of a trace's time: its step is traced once, and put into the traces of
passes that were made with a plain one."""

OPTIMISM = 0.97
"""What a rule of thumb for resident bytes is multiplied by, so that it promises no less than there is room for."""


class Prober:
    """What is known of each combination of one recipe on one device.

    sizes: micro-batches in question, up to `largest`; those whose traces would be far too long are taken out. budget:
    what may be traced. refused: what could not be built, with the reason.
    """

    def __init__(
        self, recipe: Recipe, device: Device, tools: Tools, margin: Margin, sizes: Sequence[int], budget: Budget
    ) -> None:
        self.recipe, self.device, self.tools, self.margin = recipe, device, tools, margin
        self.sizes, self.largest, self.budget = sizes, sizes[-1], budget
        self.refused: dict[Config, str] = {}
        self.failure: ModelError | None = None
        self.parameters = 0
        """Their number, once something was traced."""
        self.rounding = 1.0
        """The least that an allocator was seen to reserve at a peak, over what was asked of it there."""
        self.plain: dict[object, Config] = {}
        """Of each family of forward and backward passes, the combination that its others are measured against."""
        self._lines: dict[Config, Line] = {}
        self._exact: dict[Config, dict[int, Trace]] = {}
        self._donors: dict[object, Trace] = {}
        self._residents: dict[object, int] = {}
        self._estimates: dict[tuple[Config, int], Estimate] = {}
        self._times = LineTimes(recipe, device, tools)
        self._peaks: dict[tuple[Config, int], int] = {}

    # What is asked

    def knows(self, config: Config) -> bool:
        return config in self._lines

    def reference(self, config: Config) -> Config:
        """The combination with the same passes and its family's own optimizer."""
        plain = self.plain[config.family]
        return replace(config, precision=plain.precision, optimizer=plain.optimizer)

    def peak(self, config: Config, micro: int) -> int:
        """Bytes allocated at the peak; not rounded."""
        key = (config, micro)
        if key not in self._peaks:
            self._peaks[key] = self._lines[config].peak(micro, self.recipe.batch_size)
        return self._peaks[key]

    def seconds(self, config: Config, micro: int) -> float:
        """What a step takes, whether or not it fits."""
        return self._times.step(config, self._lines[config], micro).seconds

    def estimate(self, config: Config, micro: int) -> Estimate:
        """What it costs. Raises Spent where that takes a trace too many, Refused or ModelError where it has none."""
        key = (config, micro)
        if key not in self._estimates:
            recipe, line = config.on(self.recipe, micro), self._lines[config]
            trace = line.trace(micro, self.recipe.batch_size)
            if not self.verified(config, micro):
                trace = self.tools.with_unseen(trace, recipe, self.device)
            timed = self._times.step(config, line, micro, trace)
            found = fit(trace, self.device, self.tools, self.margin)
            peak, reserved = self.peak(config, micro), found.memory.peak_reserved
            if peak and (len(self._estimates) == 0 or reserved < self.rounding * peak):
                self.rounding = max(reserved / peak, 1.0)
            self._estimates[key] = join(trace, found, step_cost(timed, recipe, self.device, self.tools), timed.notes)
        return self._estimates[key]

    def verified(self, config: Config, micro: int) -> bool:
        """Whether the very recipe was traced."""
        return micro in self._exact.get(config, {})

    def doubtful(self, config: Config, micro: int) -> bool:
        """Whether kernels are others there than those that its figures come from."""
        return config.compiled and micro < UNROLLED and not self.verified(config, micro)

    def room(self, config: Config | None = None, *, spare: bool) -> int:
        """Bytes for the allocator, less the margin where `spare` is to stay; of any combination where none is given.
        """
        lines = self._lines.values() if config is None else [self._lines[config]]
        whole = max((capacity(line.sample, self.device) for line in lines), default=self.device.memory_bytes)
        return whole - (self.margin.of(self.device) if spare else 0)

    def sample(self) -> tuple[Config, Trace] | None:
        """Any combination that was traced, and its trace."""
        return next(((config, line.sample) for config, line in self._lines.items()), None)

    def resident(self, config: Config) -> int:
        """A lower bound of what weights, gradients and states hold at once; measured where this optimizer was traced,
        else by rule of thumb; 0 before anything was."""
        known = self._residents.get(config.update)
        if known is not None:
            return known
        return round(OPTIMISM * self.parameters * config.bytes_a_parameter)

    def optimizer_seconds(self, config: Config) -> float:
        """What the optimizer's own ops take in a step of a combination that is known."""
        return self._times.optimizer(config, self._lines[config], self.sizes[0])

    def trace_of(self, config: Config) -> Trace:
        """A trace of a combination that is known, at some micro-batch."""
        return self._lines[config].sample

    def beside(self, recipe: Recipe, sizes: Sequence[int], text: str) -> Prober:
        """A prober of a changed recipe, whose traces count together with these. text: what is told of them."""
        tools = replace(self.tools, predict=lambda recipe, device: self.predict(recipe, device, text))
        return Prober(recipe, self.device, tools, self.margin, sizes, Budget())

    # What is traced

    def probe(self, config: Config) -> bool:
        """Learn what a combination costs at every micro-batch; False where it cannot be built. Raises Spent."""
        if config in self.refused:
            return False
        if config in self._lines:
            return True
        try:
            self._lines[config] = line = self._line(config)
        except (Refused, ModelError) as error:
            self.refused[config] = str(error)
            if isinstance(error, ModelError):
                self.failure = self.failure or error
            return False
        if len(self._lines) == 1:
            self.sizes = [micro for micro in self.sizes if line.reaches(micro)] or self.sizes[:1]
        trace = line.sample
        self._residents.setdefault(config.update, resident(trace))
        self.parameters = self.parameters or parameters(trace)
        return True

    def verify(self, config: Config, micro: int) -> Estimate:
        """Trace the very recipe and cost it. Raises Spent, Refused or ModelError."""
        self._trace_exactly(config, micro)
        return self.estimate(config, micro)

    def predict(self, recipe: Recipe, device: Device | None = None, text: str = "") -> Trace:
        """A resolved recipe's trace, counted. Raises Spent, Refused or ModelError."""
        self.budget.spend(text, needed=not self._lines)
        trace = self.tools.predict(recipe, device or self.device)
        self.budget.charge(trace, recipe)
        return trace

    def _line(self, config: Config) -> Line:
        exact = self._exact.setdefault(config, {})
        at_low, at_high = probes(config)

        def line(low: Trace | None, high: Trace | None) -> Line:
            return Line(low, at_low, high, at_high, exact, lambda micro: self._trace_exactly(config, micro))

        if len(self.sizes) <= len(PROBES):
            for micro in self.sizes:
                self._trace_exactly(config, micro)
            return line(None, None)
        plain = self.plain[config.family]
        reference = self.reference(config)
        if config == plain:
            return line(self._window(config, at_low), self._window(config, at_high))
        if not self.probe(plain):
            raise Refused(self.refused[plain])
        known = self._lines[plain]
        if config != reference:
            if not self.probe(reference):
                raise Refused(self.refused[reference])
            donor, base = self._donor(config), self._lines[reference]
            low, high = (with_optimizer(trace, donor) for trace in (base.low, base.high) if trace is not None)
            if low is not None and high is not None:
                return line(low, high)
        high = self._window(config, at_high)
        low = None
        if known.high is not None and known.low is not None:
            low = transfer(high, known.high, known.low, roughly=config.compiled)
        return line(self._window(config, at_low) if low is None else low, high)

    def _donor(self, config: Config) -> Trace:
        """A trace with this combination's optimizer, of whichever forward and backward passes."""
        if config.update not in self._donors:
            plain = self.plain[config.family]
            giver = replace(plain, precision=config.precision, optimizer=config.optimizer, compile=NoCompile(),
                            checkpointing=NoCheckpointing())  # some of which would need a compiler
            self._window(giver, PROBES[0])
        return self._donors[config.update]

    def _window(self, config: Config, micro: int) -> Trace:
        """A window of two micro-batches, from which any longer or shorter one follows; without evaluation, whose peak
        is below the step's."""
        recipe = without_evaluation(config.on(self.recipe, micro, 2 * micro))
        donor = self._donors.get(config.update)
        if donor is not None and sum(op.phase is Phase.OPTIMIZER for op, _ in donor.step_ops()) > MANY_OPS:
            cheap = config.with_plain_sgd().on(recipe, micro)
            if not cheap.refusals(self.device):
                passes = self.predict(cheap, text=describe(config, micro))
                whole = with_optimizer(passes, donor)
                if whole is not None:
                    return whole
        trace = self.predict(recipe, text=describe(config, micro))
        self._donors.setdefault(config.update, trace)
        return trace

    def _trace_exactly(self, config: Config, micro: int) -> Trace:
        exact = self._exact.setdefault(config, {})
        if micro not in exact:
            exact[micro] = self.predict(config.on(self.recipe, micro), text=describe(config, micro))
            self._times.forget(config, micro)
            self._estimates.pop((config, micro), None)
            self._peaks.pop((config, micro), None)
        return exact[micro]


def without_evaluation(recipe: Recipe) -> Recipe:
    """The recipe with no data held out."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval_fraction": 0.0})})


def probes(config: Config) -> tuple[int, int]:
    """The micro-batches of a combination's two traces."""
    return COMPILED_PROBES if config.compiled else PROBES
