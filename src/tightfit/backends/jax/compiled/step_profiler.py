"""Measuring steps of the run that takes them: some as they are, then one under JAX's profiler.

The plain steps give wall seconds: of the wait for data and of the whole. A compiled step is one program, in which the
passes have no seconds of their own: the plain step's are shared out by what the instructions took. Memory is XLA's plan
of the profiled step, which is compiled with a description of it; on CUDA without graphs, which hide the instruction
that a kernel is of.

In JAX's profile an instruction is an event on one of XLA's threads; on CUDA it is the kernels that it launched, on the
card's streams. Both carry the names of the instruction and of its program.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.profiler import ProfileData

from tightfit.backends.jax.compiled.trace import read_step, trace_of
from tightfit.backends.jax.loading import ArrayGlobalBatch
from tightfit.backends.jax.step import PendingStep, Step
from tightfit.backends.measurements import Measurement
from tightfit.errors import ReportError, one_line
from tightfit.files import replacing
from tightfit.trace import WALL_PHASES, Op, OpClass, Phase, Trace

WRITTEN = "plugins/profile/*/*"
"""The files of JAX's profiler, where TensorBoard and xprof look for them."""
HOST, CARD, STREAM = "/host:CPU", "/device:GPU:0", "Stream"
"""The profiler's names of the host's threads, of the first card, and of that card's streams."""
INSTRUCTION, PROGRAM, ORDINAL = "hlo_op", "hlo_module", "device_ordinal"
"""The names of an event's instruction, its program, and the number of its device."""
STARTED, ENDED = ("_pt", "_p"), ("_ct", "_c")
"""Numbers that an event and the end of what it handed to other threads have in common."""
XPLANE, CHROME = ".xplane.pb", ".trace.json.gz"


class StepProfiler:
    """See `backends.base.StepProfiler` for what each method promises."""

    def __init__(self, step: Step) -> None:
        self._step = step
        folder = Path(tempfile.mkdtemp(prefix="tightfit-profile-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._dump, self._written = folder / "dump", folder / "profile"
        self._platform = step.build.devices[0].platform
        self._timed: list[tuple[float, float]] = []
        self._seconds = 0.0
        self._failure: str | None = "none was taken"

    @contextmanager
    def timed(self) -> Iterator[None]:
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self._timed.append((time.perf_counter() - began, self._step.called_at - began))

    def profiled(self, global_batch: ArrayGlobalBatch, learning_rate: float) -> PendingStep:
        step, options = self._step, jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls would be most of the profile
        without_graphs = {} if self._platform == "cpu" else {"xla_gpu_enable_command_buffer": ""}
        try:
            program = step.compile_with_dump(global_batch, self._dump, without_graphs)
            self._wait()
            jax.profiler.start_trace(self._written, profiler_options=options)
        except Exception as error:  # another profile may be under way; nothing was learned yet
            self._failure = one_line(error)
            return step(global_batch, learning_rate)
        began = time.perf_counter()
        try:
            pending = step(global_batch, learning_rate, program)
            pending.read()
            self._wait()
            self._seconds = time.perf_counter() - began
        finally:
            try:
                jax.profiler.stop_trace()
                self._failure = None
            except Exception as error:  # the step is taken all the same
                self._failure = one_line(error)
        return pending

    def measurement(self, chrome_trace: Path | None = None) -> Measurement:
        if self._failure is not None:
            raise ReportError(f"the step could not be followed: {self._failure}")
        wall, waited = sorted(self._timed)[len(self._timed) // 2]
        profile = self._file(XPLANE).read_bytes()
        trace = self._trace(profile)
        if chrome_trace is not None:
            with replacing(chrome_trace) as temporary:
                shutil.copyfile(self._file(CHROME), temporary)
        overhead = (self._seconds + waited) / wall if wall else 1.0
        return Measurement(
            trace=trace, step_seconds=wall, phase_seconds=_phases(trace, wall, waited), overhead=overhead,
            peak_bytes=trace.peak()[1], xplane=profile,
        )  # fmt: skip

    def _trace(self, profile: bytes) -> Trace:
        try:
            compiled = read_step(self._dump, self._platform)
        except FileNotFoundError as error:
            raise ReportError(f"the step could not be followed: {error}") from None
        timed, others = read_events(profile, compiled.program.name, self._platform)
        if not any(name in compiled.ops for name in timed):
            raise ReportError("the step could not be followed: JAX's profile names none of its instructions")
        trace = trace_of(compiled, timed)
        busy = sum(op.seconds or 0.0 for op in trace.ops)
        # Not those that run others: on a processor their events lie around the others'.
        known = {name for lines in compiled.program.computations.values() for name in lines}
        unknown = {**others, **{name: seconds for name, seconds in timed.items() if name not in known}}
        trace.ops += [Op(name=name, tick=trace.span("step 1").start, phase=Phase.SETUP, op_class=OpClass.OTHER,
                         seconds=seconds) for name, seconds in unknown.items()]
        if lost := sum(unknown.values()):
            trace.notes.append(f"{lost / (busy + lost):.2%} of the time is of events that belong to no instruction of "
                               "the compiled step: they stand under other, outside of all modules")
        if self._platform == "gpu":
            trace.notes.append("the peak is what XLA planned for the step; since the process began, the most that "
                               f"JAX's allocator had in use was {self._step.peak_memory():,} bytes")
        return trace

    def _wait(self) -> None:
        jax.block_until_ready(self._step.state)

    def _file(self, ending: str) -> Path:
        return next(path for path in sorted(self._written.glob(WRITTEN)) if path.name.endswith(ending))


def _phases(trace: Trace, wall: float, waited: float) -> dict[Phase, float]:
    """The plain step's seconds behind its wait for data, shared out by what the instructions of each pass took."""
    taken = dict.fromkeys(WALL_PHASES, 0.0)
    for op in trace.ops:
        phase = Phase.BACKWARD if op.phase is Phase.RECOMPUTE else op.phase
        if phase in taken:
            taken[phase] += op.seconds or 0.0
    whole = sum(taken.values())
    return {phase: (wall - waited) * seconds / whole for phase, seconds in taken.items()} | {Phase.DATA: waited}


def read_events(profile: bytes, program: str, platform: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of all turns of each instruction of a program, by name, and of what ran on the card for no instruction.

    profile: as JAX's profiler serializes it. platform: `cpu` or `gpu`.
    """
    read = ProfileData.from_serialized_xspace(profile)  # its planes end with it
    wanted, lines = (HOST, "") if platform == "cpu" else (CARD, STREAM)
    events = [(event, dict(event.stats)) for plane in read.planes if plane.name == wanted for line in plane.lines
              if line.name.startswith(lines) for event in line.events]  # fmt: skip
    ends = {tuple(map(said.get, ENDED)): event.start_ns + event.duration_ns for event, said in events
            if ENDED[1] in said}  # fmt: skip
    seconds, others = defaultdict[str, float](float), defaultdict[str, float](float)
    for event, said in events:
        if INSTRUCTION in said and said.get(PROGRAM, program) == program and not said.get(ORDINAL):
            stop = event.start_ns + event.duration_ns
            stop = max(stop, ends.get(tuple(map(said.get, STARTED)), stop))
            seconds[said[INSTRUCTION]] += (stop - event.start_ns) / 1e9
        elif platform != "cpu":
            others[event.name] += event.duration_ns / 1e9
    return seconds, others
