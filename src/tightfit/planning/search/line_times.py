"""What a step of a combination takes at any micro-batch, from the traces that there are of it."""

from __future__ import annotations

from dataclasses import replace

from tightfit.devices import Device
from tightfit.planning.estimate import Timed, Tools
from tightfit.planning.search.candidates import Config
from tightfit.planning.search.lines import Line, optimizer_only
from tightfit.recipe import Recipe
from tightfit.trace import Trace


class LineTimes:
    """The times of one recipe's combinations on one device, each worked out once."""

    def __init__(self, recipe: Recipe, device: Device, tools: Tools) -> None:
        self.recipe, self.device, self.tools = recipe, device, tools
        self._known: dict[tuple[Config, int], Timed] = {}
        self._affine: dict[Config, tuple[Timed, Timed, float]] = {}

    def step(self, config: Config, line: Line, micro: int, trace: Trace | None = None) -> Timed:
        """What a step takes, whether or not it fits. trace: its own, where it was made already."""
        key = (config, micro)
        if key not in self._known:
            if trace is None and line.rigid and micro not in line.exact:
                return self._affine_time(config, line, micro)
            if trace is None:
                trace = line.trace(micro, self.recipe.batch_size)
            timed = self._time(trace, config, micro)
            full, rest = divmod(self.recipe.batch_size, micro)
            if rest and full > 1 and micro not in line.exact:
                shorter = self._ragged(config, line, micro, full, rest)
                timed = timed if shorter is None else replace(timed, seconds=shorter)
            self._known[key] = timed
        return self._known[key]

    def optimizer(self, config: Config, line: Line, micro: int) -> float:
        """Seconds that the optimizer's own ops take in a step."""
        only = optimizer_only(line.sample)
        return 0.0 if only is None else self._time(only, config, micro).seconds

    def forget(self, config: Config, micro: int) -> None:
        """Work it out anew: the very recipe was traced."""
        self._known.pop((config, micro), None)

    def _affine_time(self, config: Config, line: Line, micro: int) -> Timed:
        """A step's time where its trace cannot be interpolated: a micro-batch's is taken to be affine in its size."""
        if config not in self._affine:
            assert line.low is not None
            assert line.high is not None
            self._affine[config] = (
                self._time(line.low, config, line.at_low, 2 * line.at_low),
                self._time(line.high, config, line.at_high, 2 * line.at_high),
                self.optimizer(config, line, micro),
            )
        low, high, update = self._affine[config]
        each = (low.seconds - update) / 2
        each += (high.seconds - low.seconds) / 2 * (micro - line.at_low) / (line.at_high - line.at_low)
        return replace(low, seconds=max(each, 0.0) * self.recipe.batch_size / micro + update)

    def _ragged(self, config: Config, line: Line, micro: int, full: int, rest: int) -> float | None:
        """Seconds of a window whose last micro-batch has only `rest` samples: a window without it, and what one such
        micro-batch more adds to a window of one."""
        seconds = []
        for size, batch in ((micro, full * micro), (rest, 2 * rest), (rest, rest)):
            made = line.made(size, batch)
            if made is None:
                return None
            seconds.append(self._time(made, config, size, batch).seconds)
        return seconds[0] + seconds[1] - seconds[2]

    def _time(self, trace: Trace, config: Config, micro: int, batch: int | None = None) -> Timed:
        timed = self.tools.step_time(trace, config.on(self.recipe, micro, batch), self.device)
        return Timed(seconds=timed.seconds, calibrated=timed.calibrated, notes=tuple(timed.notes))
