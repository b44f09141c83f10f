"""The kernels of a compiled step: their place in the model, their FLOPs and their bytes.

XLA's own cost analysis is empty for a GPU that is not there, and counts the inside of a loop once. Here matrix products
are counted by their shapes, bytes by what a kernel reads and writes, and both as often as the loops around them run.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tightfit.backends.jax.compiled.program import INSIDE, STACKING, Instruction, Program, phase_of, scope
from tightfit.trace import FUSED_PREFIX, Op, OpClass

TARGET = re.compile(r'custom_call_target="([^"]*)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CALLS = {"while", "call", "conditional"}
"""Instructions that run others, which take the time."""
UNTIMED = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "opt-barrier"}
"""Instructions that take no time."""
ASYNC_ENDINGS = ("-done", "-update")
"""Endings of the second halves of asynchronous instructions."""
SLICES = {"dynamic-slice", "slice", "gather"}
"""Instructions that read no more of their first operand than they give."""
PASSES_ON = {"bitcast", "convert", "copy", "reshape", "transpose"}
"""Instructions that hand on as many elements as they are given."""
ARITHMETIC = {"add", "multiply", "subtract", "divide", "exponential", "tanh", "select", "compare", "rsqrt"}

Matmul = tuple[str, tuple[int, int, int, int]]
"""A matrix product: its operands' format, and its batch, rows, columns and depth."""


def kernels(program: Program, positions: Mapping[str, int]) -> dict[str, Op]:
    """Every kernel of the step by its instruction's name, once, with the FLOPs and bytes of all its runs.

    positions: each instruction's place in the order in which the program runs.
    """
    return {each.name: _op(each, runs, each.origin(loop), positions.get(each.name, 0) + 1)
            for each, runs, loop in _running(program, program.entry)}


def _running(program: Program, computation: str, runs: int = 1, loop: str = "") -> Iterator[
    tuple[Instruction, int, str]
]:
    """Each instruction that takes time, how often it runs, and JAX's name for the loop that runs it."""
    for instruction in program.computations[computation].values():
        if instruction.code in CALLS:
            trips = TRIPS.search(instruction.text)
            times = runs * (int(trips[1]) if trips else 1)
            for each in INSIDE.findall(instruction.text):
                if each in program.computations:
                    yield from _running(program, each, times, instruction.op_name or loop)
        elif instruction.code not in UNTIMED and not instruction.code.endswith(ASYNC_ENDINGS):
            yield instruction, runs, loop


def _op(instruction: Instruction, runs: int, named: str, tick: int) -> Op:
    matmul, target = _matmul(instruction), _target(instruction)
    read, written = _moved(instruction)
    name, flops, shapes = instruction.name.split(".")[0], 0, tuple[tuple[int, ...], ...]()
    dtype = instruction.results[0][0] if instruction.results else ""
    codes = {each.code for each in (instruction, *instruction.body.values())}
    op_class = OpClass.ELEMENTWISE if codes & ARITHMETIC else OpClass.MOVEMENT
    if matmul:
        dtype, (batch, m, n, k) = matmul
        op_class, flops = OpClass.CONTRACTION, 2 * batch * m * n * k
        shapes = ((runs * batch, m, k), (runs * batch, k, n))
        if "fmha" in target:
            name = f"cudnn attention{' backward' * ('Backward' in target)}"
            shapes = ((runs * batch, 1, m, k),)
    elif instruction.stacks:
        name, op_class = STACKING, OpClass.MOVEMENT
    elif codes & {"reduce", "reduce-window"}:
        op_class = OpClass.NORMALIZATION
    return Op(
        name=FUSED_PREFIX + name, tick=tick, phase=phase_of(named), module=scope(named), shapes=shapes, dtype=dtype,
        op_class=op_class, flops=runs * flops, bytes_read=runs * read, bytes_written=runs * written, kernels=runs,
    )  # fmt: skip


def _target(instruction: Instruction) -> str:
    """The library function that a custom call is of; empty for any other instruction."""
    found = TARGET.search(instruction.text) if instruction.code == "custom-call" else None
    return found[1] if found else ""


def _matmul(instruction: Instruction) -> Matmul | None:
    """A kernel's matrix product; None where it has none."""
    target = _target(instruction)
    for each in (instruction, *instruction.body.values()):
        if each.code == "dot" or "gemm" in target or "matmul" in target:
            return _product(each)
    operands = [operand.results[0] for operand in instruction.operands]
    if "fmha" in target and len(operands) >= 2:  # scores and mixing; the gradients are five more such products
        times = 5 if "Backward" in target else 2
        (dtype, query), (_, key) = operands[0], operands[1]
        length, depth = query[1] if len(query) == 4 else 1, query[-1]
        heads = math.prod(query) // max(length * depth, 1)
        return dtype, (times * heads, length, key[1] if len(key) == 4 else length, depth)
    return None


def _product(instruction: Instruction) -> Matmul | None:
    """The matrix product of a `dot` or of a library's call; both write down the axes of their left operand."""
    result = next((shape for _, shape in instruction.results if shape), None)
    if not instruction.operands or result is None:
        return None
    dtype, shape = instruction.operands[0].results[0]

    def size(axes: str) -> int:
        found = re.search(rf'lhs_{axes}_dim\w+"?[=:]["{{\[]*([\d,"]*)', instruction.text)
        return math.prod(shape[int(axis)] for axis in re.findall(r"\d+", found[1])) if found else 1

    depth, batch = size("contracting"), size("batch")
    rows = math.prod(shape) // max(depth * batch, 1)
    return dtype, (batch, rows, math.prod(result) // max(rows * batch, 1), depth)


def _moved(kernel: Instruction) -> tuple[int, int]:
    """Bytes read and written by one run."""
    inside = [*kernel.body.values()] or [kernel]
    users = defaultdict[str, list[Instruction]](list)
    for each in inside:
        for operand in each.operands:
            users[operand.name].append(each)
    inputs = [each for each in inside if each.code == "parameter"] if kernel.body else kernel.operands
    # Slices are written in place.
    spared = sum(each.bytes - each.operands[1].bytes for each in inside if each.code == STACKING)
    return sum(_read(each, users) for each in inputs), max(kernel.bytes - spared, 0)


def _read(value: Instruction, users: Mapping[str, list[Instruction]]) -> int:
    """Bytes of a kernel's input that it reads."""
    total = 0
    for user in users.get(value.name, ()):
        first = user.operands[0] is value
        if first and user.code in SLICES:
            total += user.bytes
        elif user.code in PASSES_ON and user.name in users:
            total += _read(user, users) * value.bytes // max(user.bytes, 1)
        elif not (first and user.code == STACKING):
            return value.bytes
    return min(total, value.bytes)
