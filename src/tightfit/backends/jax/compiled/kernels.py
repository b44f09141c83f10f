"""The kernels of a compiled step: their place in the model, their FLOPs and their bytes.

XLA's own cost analysis is empty for a GPU that is not there, and counts the inside of a loop once. Here matrix products
are counted by their shapes, bytes by what a kernel reads and writes, and both as often as the loops around them run.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tightfit.backends.jax.compiled.program import (
    INSIDE,
    PASSES_ON,
    STACKING,
    Array,
    Instruction,
    Program,
    phase_of,
    scope,
)
from tightfit.trace import Op, OpClass

TARGET = re.compile(r'custom_call_target="([^"]*)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CALLS = {"while", "call", "conditional"}
"""Instructions that run others, which take the time."""
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "opt-barrier"}
"""Instructions that take no time."""
WAITING = ("-done", "-update")
"""Endings of the second halves of asynchronous instructions."""
SLICES = {"dynamic-slice", "slice", "gather"}
"""Instructions that read no more of their first operand than they give."""
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
        elif instruction.code not in FREE and not instruction.code.endswith(WAITING):
            yield instruction, runs, loop


def _op(instruction: Instruction, runs: int, named: str, tick: int) -> Op:
    matmul = _matmul(instruction)
    read, written = _moved(instruction)
    stacking = matmul is None and instruction.stacks
    name, shapes = STACKING if stacking else instruction.name.split(".")[0], tuple[tuple[int, ...], ...]()
    dtype = instruction.results[0][0] if instruction.results else ""
    if matmul:
        dtype, (batch, m, n, k) = matmul
        shapes = ((runs * batch, m, k), (runs * batch, k, n))
        if "fmha" in (target := _target(instruction)):
            name = f"cudnn attention{' backward' * ('Backward' in target)}"
            shapes = ((runs * batch, 1, m, k),)
    return Op(
        name=f"fused {name}", tick=tick, phase=phase_of(named), module=scope(named), shapes=shapes, dtype=dtype,
        op_class=_class(instruction, stacking, matmul is not None),
        flops=2 * runs * math.prod(matmul[1]) if matmul else 0,
        bytes_read=runs * read, bytes_written=runs * written, kernels=runs,
    )  # fmt: skip


def _class(instruction: Instruction, stacking: bool, matmul: bool) -> OpClass:
    if matmul:
        return OpClass.CONTRACTION
    codes = {instruction.code, *(each.code for each in instruction.body.values())}
    if codes & {"reduce", "reduce-global batch"} and not stacking:
        return OpClass.NORMALIZATION
    return OpClass.ELEMENTWISE if codes & ARITHMETIC and not stacking else OpClass.MOVEMENT


def _target(instruction: Instruction) -> str:
    """The library function that a custom call is of; empty for any other instruction."""
    found = TARGET.search(instruction.text) if instruction.code == "custom-call" else None
    return found[1] if found else ""


def _matmul(instruction: Instruction) -> Matmul | None:
    """A kernel's matrix product; None where it has none."""
    target, dot = _target(instruction), next((each for each in instruction.body.values() if each.code == "dot"), None)
    if dot is not None:
        return _product(dot)
    if instruction.code == "dot" or "gemm" in target or "matmul" in target:
        return _product(instruction)
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
    result: Array | None = next((each for each in instruction.results if each[1]), None)
    if not instruction.operands or result is None:
        return None
    dtype, shape = instruction.operands[0].results[0]

    def size(axes: str) -> int:
        found = re.search(rf'lhs_{axes}_dim\w+"?[=:]["{{\[]*([\d,"]*)', instruction.text)
        return math.prod(shape[int(axis)] for axis in re.findall(r"\d+", found[1])) if found else 1

    depth, batch = size("contracting"), size("batch")
    rows = math.prod(shape) // max(depth * batch, 1)
    return dtype, (batch, rows, math.prod(result[1]) // max(rows * batch, 1), depth)


def _moved(instruction: Instruction) -> tuple[int, int]:
    """Bytes read and written by one run."""
    if instruction.code in SLICES:
        return instruction.bytes, instruction.bytes
    operands = [operand.bytes for operand in instruction.operands]
    if instruction.code == STACKING:
        return operands[1], operands[1]
    if not instruction.body:
        return sum(operands), instruction.bytes
    users: dict[str, list[Instruction]] = defaultdict(list)
    for each in instruction.body.values():
        for operand in each.operands:
            users[operand.name].append(each)
    read = sum(_read(each, users) for each in instruction.body.values() if each.code == "parameter")
    written = instruction.bytes
    for each in instruction.body.values():
        if each.code == STACKING:  # written in place: no more than the slice
            written -= min(each.bytes - each.operands[1].bytes, written)
    return read, written


def _read(value: Instruction, users: Mapping[str, list[Instruction]]) -> int:
    """Bytes of a kernel's input that it reads."""
    total = 0
    for user in users.get(value.name, ()):
        first = user.operands[0] is value
        if first and user.code in SLICES:
            total += user.bytes
        elif user.code in PASSES_ON:
            total += min(value.bytes, _read(user, users) * value.bytes // max(user.bytes, 1))
        elif not (first and user.code == STACKING):
            return value.bytes
    return min(total, value.bytes)
